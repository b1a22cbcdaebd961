"""A request that begins with stored KV gets the tokens it gets cold, to the last bit where the arithmetic allows it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from effort import thorough
from stages import pipeline, prompt, shorten_blocks

import splitinfer
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.stage import loader as stage_loader
from splitinfer.llm import LLM

BLOCK = 64  # WindowKVCache keeps positions aligned to this
KINDS = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, BLOCK)


@contextmanager
def served(folder: Path, cuts: list[int], *, prefix_cache: bool = True, **more: Any) -> Iterator[LLM]:
    with pipeline(folder, cuts, prefix_cache=prefix_cache, token_budget=BLOCK, **more) as llm:
        yield llm


def num_layers(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def ask(llm: LLM, tokens: list[int], **params: Any) -> splitinfer.RequestOutput:
    return llm.generate([tokens], SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}))[0]


def num_copied(llm: LLM) -> int:
    """Bytes of stored KV that its stages have copied."""
    return sum(stage["bytes_copied"] for stage in llm.stats()["stages"])


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize(("kind", "num_stages"), [*((kind, 2) for kind in KINDS), ("llama", 3), ("gemma3_text", 3)])
def test_a_second_turn_gets_the_tokens_it_gets_cold(
    tiny_folder: Callable[..., Path], kind: str, num_stages: int, is_left: bool
):
    """In the KV that the first one left; in a copy of its blocks, where another request has come between."""
    folder, (first, more) = tiny_folder(kind), (prompt(150), prompt(9, seed=5))
    cuts = [num_layers(folder) - num_stages + 1, *[1] * (num_stages - 1)]
    asked: list[tuple[list[int], dict[str, Any], splitinfer.RequestOutput]] = []
    with served(folder, cuts) as llm:
        for params in ({}, {"temperature": 0.8, "seed": 3}):
            one = ask(llm, first, **params)
            turn = [*first, *one.token_ids, *more]
            if not is_left:
                ask(llm, prompt(3), **params)
            copied = num_copied(llm)
            hit = ask(llm, turn, **params)
            assert (num_copied(llm) == copied) is is_left
            edited = [*turn[:140], *more]
            also = ask(llm, edited, **params)
            assert hit.num_cached_tokens == len(first) + len(one.token_ids) - 1
            assert also.num_cached_tokens >= 128
            asked += [(turn, params, hit), (edited, params, also)]
    with served(folder, cuts, prefix_cache=False) as llm:
        for tokens, params, warm in asked:
            cold = ask(llm, tokens, **params)
            assert cold.num_cached_tokens == 0
            assert cold.token_ids == warm.token_ids


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_many_with_one_system_prompt_compute_it_once(tiny_folder: Callable[..., Path], kind: str):
    system, num = prompt(3 * BLOCK, seed=2), 6
    prompts = [[*system, *prompt(7, seed=i)] for i in range(num)]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.7, seed=5)
    with served(tiny_folder(kind), [1, num_layers(tiny_folder(kind)) - 1]) as llm:
        outs = llm.generate(prompts, params)
        computed = llm.stats()["computed_tokens"]
    assert computed <= len(system) + num * (7 + 4)
    assert [out.num_cached_tokens for out in outs] == [0] + [len(system)] * (num - 1)
    with served(tiny_folder(kind), [1, num_layers(tiny_folder(kind)) - 1], prefix_cache=False) as llm:
        assert [out.token_ids for out in outs] == [llm.generate([one], params)[0].token_ids for one in prompts]


def test_short_of_memory_the_tokens_stay_right(tiny_folder: Callable[..., Path]):
    """What is kept goes, and comes again; nobody can tell from the tokens."""
    prompts = [[*prompt(BLOCK + 5, seed=i % 3), *prompt(20, seed=i)] for i in range(6)]
    params = SamplingParams(max_tokens=thorough(15, 30), ignore_eos=True)
    with served(tiny_folder("llama"), [2, 2], prefix_cache=False) as llm:
        alone = [llm.generate([one], params)[0].token_ids for one in prompts]
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    for num_blocks in (3, 12):
        with served(tiny_folder("llama"), [2, 2], kv_bytes=num_blocks * BLOCK * per_token) as llm:
            for _ in range(2):
                assert [out.token_ids for out in llm.generate(prompts, params)] == alone


def test_short_of_memory_a_prompt_that_was_given_up_goes_on(tiny_folder: Callable[..., Path]):
    """Its blocks take its place, and it takes theirs: there is no room for both. (A stored block counts as four here,
    because stages are surveyed with blocks of their usual size.)"""
    long = prompt(7 * BLOCK, seed=1)
    with served(tiny_folder("llama"), [2, 2], prefix_cache=False) as llm:
        alone = ask(llm, long).token_ids
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    with served(tiny_folder("llama"), [2, 2], kv_bytes=9 * BLOCK * per_token) as llm:
        for _ in range(3):
            request = llm.submit(long, SamplingParams(max_tokens=8, ignore_eos=True))
            next(iter(request))
            request.abort()
        again = ask(llm, long)
        assert again.num_cached_tokens >= 2 * BLOCK
        assert again.token_ids == alone


def test_where_buffers_are_few_fewer_blocks_are_kept(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where their number is limited: here to four blocks of two layers, and as many again for the rest."""
    monkeypatch.setattr(stage_loader, "resource_limit", lambda: 2 * 4 * 2)
    most = 0
    with served(tiny_folder("llama"), [2, 2]) as llm:
        own = llm._engine.pipeline._own
        assert own is not None
        for seed in range(6):
            ask(llm, prompt(2 * BLOCK + 5, seed=seed))
            arrays = sum(len(block.arrays()) for block in own.runner.pool._blocks.values())
            most = max(most, arrays)
    assert 0 < most <= 4 * 2


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_what_is_kept_is_counted_as_the_stages_count_it(tiny_folder: Callable[..., Path], kind: str):
    with served(tiny_folder(kind), [1, num_layers(tiny_folder(kind)) - 1]) as llm:
        ask(llm, prompt(3 * BLOCK), max_tokens=1)
        ask(llm, prompt(2), max_tokens=1)  # its steps carry what the end of the first one left to do
        own = llm._engine.pipeline._own
        assert own is not None
        kept = [block for block in llm._engine.scheduler.prefix_cache.tree if len(block.tokens) == BLOCK]
        held = sum(own.runner.pool._blocks[block.block_id].nbytes for block in kept)
        # What the survey counts is a block of 256 tokens.
        assert held * 256 == len(kept) * BLOCK * own.ready.kv_bytes_stored
        assert len(kept) == 3
