"""A request that begins with kept KV gets the tokens it gets cold."""

from itertools import product

import pytest
from engine import door
from engine.door import Ask, Open, ask
from stages import prompt
from tiny import Folder

BLOCK = 64  # WindowKVCache keeps positions aligned to this
MORE = product(["llama", "gemma3_text", "qwen3_next", "qwen3_moe", "gpt_oss", "deepseek_v3"], [True, False])


@pytest.mark.parametrize(("kind", "is_left"), [
    ("llama", True), ("qwen3_next", False),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in MORE),
])  # fmt: skip
def test_a_second_turn_gets_the_tokens_it_gets_cold(
    kind: str, is_left: bool, tiny_folder: Folder, pipeline: Open
) -> None:
    """In the KV that the first one left; in a copy of its blocks, where another request has come between."""
    first = ask(150, max_tokens=8, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5)
    cuts = [door.num_layers(tiny_folder(kind)) - 2, 1, 1]
    with pipeline(kind, cuts, block=BLOCK, token_budget=BLOCK) as there:
        (said,) = there.answers(first)
        if not is_left:
            there.answers(ask(3))
        before = sum(stage["bytes_copied"] for stage in there.stats["stages"])
        turn = Ask((*first.tokens, *said, *prompt(9, seed=5)), first.params)
        (hit,) = there.outputs(turn)
        copied = sum(stage["bytes_copied"] for stage in there.stats["stages"]) - before
        (edited,) = there.outputs(Ask((*turn.tokens[:140], *prompt(9, seed=5)), first.params))
    assert hit.num_cached_tokens == len(first.tokens) + len(said) - 1
    assert (copied == 0) is is_left
    assert edited.num_cached_tokens >= 128
