"""A request that begins with kept KV gets the tokens it gets cold."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from engine import door
from engine.door import Ask, Open, ask
from stages import prompt

BLOCK = 64  # WindowKVCache keeps positions aligned to this
MORE = product(["llama", "gemma3_text", "qwen3_next", "qwen3_moe", "gpt_oss", "deepseek_v3"], [True, False])


@pytest.mark.parametrize(("kind", "is_left"), [
    ("llama", True), ("qwen3_next", False),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in MORE),
])  # fmt: skip
def test_a_second_turn_gets_the_tokens_it_gets_cold(
    kind: str, is_left: bool, tiny_folder: Callable[..., Path], pipeline: Open
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


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_many_with_one_system_prompt_compute_it_once(kind: str, pipeline: Open) -> None:
    system = prompt(3 * BLOCK, seed=2)
    asks = [replace(ask(7, prompt=i, max_tokens=4, temperature=0.7)) for i in range(6)]
    with pipeline(kind, [1, 3], block=BLOCK, token_budget=BLOCK) as there:
        outputs = there.outputs(*(replace(one, tokens=(*system, *one.tokens)) for one in asks))
        assert there.stats["computed_tokens"] <= len(system) + len(asks) * (7 + 4)
    assert [out.num_cached_tokens for out in outputs] == [0] + [len(system)] * (len(asks) - 1)


def test_short_of_memory_a_prompt_that_was_given_up_goes_on(pipeline: Open) -> None:
    """Its blocks take its place, and it takes theirs: there is no room for both. (A stored block counts as four here,
    because stages are surveyed with blocks of their usual size.)"""
    long = ask(7 * BLOCK, prompt=1, max_tokens=8)
    with pipeline("llama", [2, 2], block=BLOCK, token_budget=BLOCK, kv_bytes=9 * BLOCK * 512) as there:
        for _ in range(3):
            there.outputs(replace(long, leaves_after=1))
        (again,) = there.outputs(long)
    assert again.num_cached_tokens >= 2 * BLOCK
