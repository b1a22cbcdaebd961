"""Figures from clock readings: known ones, and what must hold for any."""

import doctest
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.bench.shared import measure
from splitinfer.bench.shared.measure import Counters, Run, causes, summarize

seconds = st.floats(1e-6, 1e3)


@given(st.lists(seconds, min_size=1, max_size=12))
def test_a_summary_lies_within_its_values(values: list[float]) -> None:
    found = summarize(values)
    assert found["low"] <= found["median"] <= found["high"]
    assert (found["median"], found["values"]) == (statistics.median(values), values)
    assert 0 <= found["spread"] <= 100 * (found["high"] - found["low"]) / found["median"] + 1e-6


def test_spread_is_the_distance_of_the_quartiles() -> None:
    found = summarize([8.0, 9.0, 10.0, 11.0, 12.0])
    assert (found["median"], found["spread"]) == (10.0, 20.0)


@pytest.mark.parametrize(("before", "tokens", "seconds"), [(1, 2, 0.5), (2, 2, 1.25), (1, 3, 1.0)])
def test_seconds_are_of_the_tokens_that_were_counted(before: int, tokens: int, seconds: float) -> None:
    """Whoever reads the counters may be some tokens behind the engine. The first token is no part of the rate."""
    spent = Counters((0.0,), (0,), (0,), tokens)
    run = Run((1, 2, 3, 4), (5.0, 5.5, 6.0, 8.0), spent, before)
    assert (run.ttft, run.seconds_per_token, run.counted_seconds_per_token) == (5.0, 1.0, seconds)


def stats(busy: list[float], steps: int, sent: list[int], tokens: int, **more: float) -> dict[str, object]:
    stages = [{"busy_seconds": b, "steps": steps, "bytes_sent": s} for b, s in zip(busy, sent, strict=True)]
    return {"stages": stages, "generated_tokens": tokens, **more}


def test_time_by_cause_worked_out_by_hand() -> None:
    """10 tokens in 1 s: 40 ms here, 50 ms there, and 10 ms for hops and host, of which the hops are 7."""
    before = Counters.of(stats([1.0, 2.0], 4, [400, 0], 3, away_seconds=2.5))
    after = Counters.of(stats([1.4, 2.5], 14, [1400, 0], 13, away_seconds=3.07))
    spent = after - before
    assert (spent.tokens, spent.steps) == (10, (10, 10))
    found = causes(spent, 0.1)
    assert found.compute == pytest.approx((0.04, 0.05))
    assert (found.hops_and_host, found.hops, found.host) == pytest.approx((0.01, 0.007, 0.003))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=4), st.integers(1, 100), st.floats(0, 10), seconds)
def test_causes_add_up_to_the_whole(busy: list[float], tokens: int, away: float, wall: float) -> None:
    zeros = (0,) * len(busy)
    found = causes(Counters(tuple(busy), zeros, zeros, tokens, away), wall)
    assert found.hops is not None
    assert found.host is not None
    assert sum(found.compute) + found.hops + found.host == pytest.approx(wall, abs=1e-6)
    assert found.hops + found.host == pytest.approx(found.hops_and_host, abs=1e-6)


def test_examples_in_the_text() -> None:
    assert doctest.testmod(measure).failed == 0
