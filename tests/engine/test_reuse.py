"""A request that begins with stored KV gets the tokens it gets cold, to the last bit where the arithmetic allows it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stages import pipeline, prompt

import splitinfer
from splitinfer.core import kv_budget, prefix, scheduler
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM

BLOCK = 64  # WindowKVCache keeps positions aligned to this
KINDS = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_budget, prefix, scheduler):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@contextmanager
def served(folder: Path, cuts: list[int], *, prefix_cache: bool = True, **more: Any) -> Iterator[LLM]:
    with pipeline(folder, cuts, prefix_cache=prefix_cache, token_budget=BLOCK, **more) as llm:
        yield llm


def ask(llm: LLM, tokens: list[int], **params: Any) -> splitinfer.RequestOutput:
    return llm.generate([tokens], SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params}))[0]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_gets_the_tokens_it_gets_cold(tiny_folder: Callable[..., Path], kind: str, num_stages: int):
    folder = tiny_folder(kind)
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    cuts = [num_layers - num_stages + 1, *[1] * (num_stages - 1)]
    first, more = prompt(150), prompt(9, seed=5)
    for params in ({}, {"temperature": 0.8, "seed": 3}):
        with served(folder, cuts) as llm:
            one = ask(llm, first, **params)
            turn = [*first, *one.token_ids, *more]
            hit = ask(llm, turn, **params)
            edited = [*turn[:140], *more]
            also = ask(llm, edited, **params)
        with served(folder, cuts, prefix_cache=False) as llm:
            cold, other = ask(llm, turn, **params), ask(llm, edited, **params)
        assert cold.num_cached_tokens == 0
        assert hit.num_cached_tokens == len(first) + len(one.token_ids) - 1
        assert also.num_cached_tokens in (140, 128)
        assert (hit.token_ids, also.token_ids) == (cold.token_ids, other.token_ids)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_many_with_one_system_prompt_compute_it_once(tiny_folder: Callable[..., Path], kind: str):
    system, num = prompt(4 * BLOCK, seed=2), 8
    prompts = [[*system, *prompt(7, seed=i)] for i in range(num)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.7, seed=5)
    num_layers = json.loads((tiny_folder(kind) / "config.json").read_text())["num_hidden_layers"]
    with served(tiny_folder(kind), [1, num_layers - 1]) as llm:
        outs = llm.generate(prompts, params)
        computed = llm.stats()["computed_tokens"]
    assert computed <= len(system) + num * (7 + 6)
    assert [out.num_cached_tokens for out in outs] == [0] + [len(system)] * (num - 1)
    with served(tiny_folder(kind), [1, num_layers - 1], prefix_cache=False) as llm:
        assert [out.token_ids for out in outs] == [llm.generate([one], params)[0].token_ids for one in prompts]


def test_short_of_memory_the_tokens_stay_right(tiny_folder: Callable[..., Path]):
    """What is kept goes, and comes again; nobody can tell from the tokens."""
    prompts = [[*prompt(BLOCK + 5, seed=i % 3), *prompt(20, seed=i)] for i in range(9)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with served(tiny_folder("llama"), [2, 2], prefix_cache=False) as llm:
        alone = [llm.generate([one], params)[0].token_ids for one in prompts]
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    for num_blocks in (3, 5, 9, 30):
        with served(tiny_folder("llama"), [2, 2], kv_bytes=num_blocks * BLOCK * per_token) as llm:
            for _ in range(2):
                assert [out.token_ids for out in llm.generate(prompts, params)] == alone


def test_what_is_kept_is_counted_as_the_stages_count_it(tiny_folder: Callable[..., Path]):
    for kind in ("llama", "gemma3_text", "qwen3_next", "deepseek_v3"):
        num_layers = json.loads((tiny_folder(kind) / "config.json").read_text())["num_hidden_layers"]
        with served(tiny_folder(kind), [1, num_layers - 1]) as llm:
            ask(llm, prompt(3 * BLOCK), max_tokens=1)
            llm.generate([prompt(2)])  # its steps carry what the end of the first one left to do
            stages, pipeline_ = llm.stats()["stages"], llm._engine.pipeline
            assert pipeline_._own is not None
            held = pipeline_._own.runner.pool.stored_nbytes
            # Counted in blocks of 256 tokens, whatever the length of a block is in these tests.
            assert held <= stages[0]["kv_bytes_stored"]
