"""Many requests of every kind at once: each gets the tokens that it gets alone, which the door checks.

Two stages, more requests than fit, so that they wait for each other, share steps in every way, are aborted and give up
their KV to others. Dense, sliding-window and mixture-of-experts models are exact at any chunking on the reference BLAS;
MLA and recurrent ones where prompts go in one chunk.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.door import QUICK, SECONDS, Ask, Open, alone, ask, launches_ahead
from processes import until
from tiny import Folder

NIGHTLY = pytest.mark.nightly
BLOCK = 64  # tokens of KV by which what a sequence has is counted here: short answers outgrow it


def wishes(seed: int, count: int, *, longest: int) -> list[Ask]:
    """Requests of many lengths, temperatures, seeds and priorities, some of which are aborted."""
    chance, found = random.Random(seed), []
    for i in range(count):
        long = i % 8 == 7
        made = ask(
            # Long answers outgrow what was kept free for them when they began.
            chance.randint(1, 180 if long else longest),
            prompt=i,
            max_tokens=100 if long else chance.choice([1, 5, 20, 45]),
            temperature=chance.choice([0.0, 0.0, 0.7, 1.3]),
            seed=chance.getrandbits(40),
            top_p=chance.choice([1.0, 0.9]),
            top_k=chance.choice([0, 0, 20]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
            presence_penalty=chance.choice([0.0, 0.0, 0.8, -0.5]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.6]),
            logit_bias=chance.choice([{}, {}, {5: 3.0, 40: -100.0}]),
        )
        abort = chance.choice([None, None, None, None, chance.randint(0, 10)])
        found.append(replace(made, priority=chance.choice([0, 0, 1, -1]), leaves_after=abort))
    return found


def with_stops(folder: Path, asks: Sequence[Ask], seed: int) -> list[Ask]:
    """Every third stops at a token that it will sample."""
    chance = random.Random(seed)
    return [
        replace(one, params=replace(one.params, stop_token_ids=(chance.choice(tokens),))) if i % 3 == 0 else one
        for i, (one, tokens) in enumerate(zip(asks, alone(folder, asks), strict=True))
    ]


def room(bytes_per_token: int, blocks: int) -> int:
    """Bytes that hold so many blocks, so that a few requests fill them."""
    return bytes_per_token * BLOCK * blocks


SHORT = {"block": BLOCK, "token_budget": 48, "max_running": 12, "max_waiting": 100, "kv_bytes": room(512, 12)}
ROWS: dict[str, tuple[str, list[int], int, dict[str, Any]]] = {"llama": ("llama", [2, 2], 12, SHORT)}
MORE: dict[str, tuple[str, list[int], int, dict[str, Any]]] = {
    "llama, more": ("llama", [2, 2], 50, SHORT),
    "ahead": ("llama", [2, 2], 24, {**SHORT, "fault": launches_ahead()}),
    "gemma": ("gemma3_text", [2, 4], 24, {**SHORT, "kv_bytes": room(1024, 14)}),
    "qwen3": ("qwen3", [2, 2], 50, SHORT),
    "moe": ("qwen3_moe", [1, 3], 50, {**SHORT, "kv_bytes": room(768, 12)}),
    "accelerator": ("llama", [2, 2], 24, {"token_budget": 48, "max_running": 12, "accelerator": QUICK}),
    **{name: (name, [2, 2], 20, {"token_budget": 2048, "max_running": 12}) for name in ("deepseek_v3", "qwen3_next")},
    "prefill first": ("llama", [2, 2], 24, {**SHORT, "policy": "prefill_first"}),
    "decode first": ("llama", [1, 3], 24, {**SHORT, "policy": "decode_first", "kv_bytes": room(768, 12)}),
}


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(name, marks=NIGHTLY) for name in MORE)])
def test_each_gets_the_tokens_it_gets_alone(row: str, pipeline: Open, tiny_folder: Folder) -> None:
    name, cuts, count, options = {**ROWS, **MORE}[row]
    asks = with_stops(tiny_folder(name), wishes(7, count, longest=120), 5)
    with pipeline(name, cuts, prefix_cache=False, **options) as there:
        outputs = there.outputs(*asks)
    for one, output in zip(asks, outputs, strict=True):
        ends = {"stop", "length"} if one.params.stop_token_ids else {"length"}
        assert output.finish_reason in (ends if one.leaves_after is None else {"abort", *ends})


def test_a_step_may_hold_more_tokens_than_the_context(pipeline: Open) -> None:
    with pipeline("llama", [2, 2], token_budget=200, context=40) as there:
        there.answers(*(ask(36, prompt=i, max_tokens=3) for i in range(6)))


@pytest.mark.parametrize("points", [(0, 6), pytest.param(range(24), marks=NIGHTLY)])
def test_an_abort_at_every_point_of_a_life(points: Sequence[int], pipeline: Open) -> None:
    """Before it is seen, while it waits, in each chunk of its prompt, at each token: nothing stays, nobody notices."""
    others = [replace(one, leaves_after=None) for one in wishes(9, 4, longest=60)]
    with pipeline("llama", [2, 2], token_budget=16, max_running=3, prefix_cache=False) as there:
        for steps in points:
            began = there.stats["stages"][0]["steps"]
            there.submit(*others)
            (victim,) = there.submit(ask(90, max_tokens=60))
            until(lambda: there.stats["stages"][0]["steps"] >= began + steps, "so many steps", SECONDS)  # noqa: B023
            victim.abort()
            there.finish()
            assert victim.output.finish_reason == "abort"
            until(there.is_idle, "nothing is held", SECONDS)
