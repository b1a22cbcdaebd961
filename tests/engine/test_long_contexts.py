"""Behind thousands of tokens: windows, states, latent attention, an indexer's choice and KV in few bits, over many
blocks; and a second turn on kept ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from stages import pipeline, prompt, tokens_of
from tiny import Folder

from splitinfer.core.sequence import SamplingParams

LENGTH, NUM = 4200, 6  # behind 4,096 tokens an array of KV grows by several blocks, and one with a token
_ONE_HEAD = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 32}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {**_ONE_HEAD, "head_dim": 32}),
    "window": ("gemma3_text", {**_ONE_HEAD, "sliding_window": 300, "sliding_window_pattern": 2}),
    "latent": ("deepseek_v3", _ONE_HEAD),
    "indexer": ("deepseek_v3", {**_ONE_HEAD, "model_type": "deepseek_v32", "index_head_dim": 16, "index_n_heads": 1,
                                "index_topk": 64}),
    "state": ("qwen3_next", {**_ONE_HEAD, "linear_num_value_heads": 1, "linear_num_key_heads": 1}),
}  # fmt: skip
TURN = prompt(40, seed=3)


def plain(folder: Path, tokens: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[int]]:
    """What mlx-lm says to ``tokens``, given the ``answer`` so far each time, and then to ``TURN``. One pass."""
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    cache, found = make_prompt_cache(model), list[int]()
    logits = model(mx.array([[*tokens, *answer, *TURN]]), cache=cache)[0]
    first = logits[len(tokens) - 1 : len(tokens) - 1 + len(answer)].argmax(axis=-1).tolist()
    for _ in range(NUM):
        found.append(int(logits[-1].argmax().item()))
        logits = model(mx.array([found[-1:]]), cache=cache)[0]
    return first, found


NIGHTLY = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("plain", "latent", "indexer", "state")]


@pytest.mark.parametrize("kind", ["window", *NIGHTLY])
def test_two_turns_are_mlx_lms(kind: str, tiny_folder: Folder) -> None:
    name, changes = _KINDS[kind]
    folder, tokens = tiny_folder(name, max_position_embeddings=8192, **changes), prompt(LENGTH)
    with pipeline(folder, [1, 1], context=8192) as llm:
        answer = tokens_of(llm, tokens, max_tokens=NUM)
        second = llm.generate([[*tokens, *answer, *TURN]], SamplingParams(max_tokens=NUM, ignore_eos=True))[0]
    assert second.num_cached_tokens >= LENGTH - 256
    assert (answer, second.token_ids) == plain(folder, tokens, answer)
