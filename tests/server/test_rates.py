"""How much a key may ask, and what a refusal costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.server.keys import NOBODY, ApiKey
from splitinfer.server.problem import Problem
from splitinfer.server.rates import Rates


def key(per_minute: float | None = None, concurrent: int | None = None) -> ApiKey:
    return ApiKey("one", "0" * 64, requests_per_minute=per_minute, concurrent=concurrent)


def refusal(rates: Rates, one: ApiKey, now: float) -> Problem | None:
    try:
        rates.begin(one, now)
    except Problem as problem:
        return problem
    return None


def test_requests_at_a_time():
    rates, one = Rates(), key(concurrent=2)
    assert refusal(rates, one, 0) is None
    assert refusal(rates, one, 0) is None
    refused = refusal(rates, one, 0)
    assert refused is not None
    assert (refused.status, str(refused)) == (429, "key 'one' has 2 answers under way, and may have 2")
    rates.end(one)
    assert refusal(rates, one, 0) is None
    assert refusal(rates, one, 0) is not None


def test_what_is_not_carried_out_costs_nothing():
    rates, one = Rates(), key(per_minute=4, concurrent=1)  # one request at once
    for _ in range(3):
        rates.begin(one, 0)
        rates.take_back(one)
    rates.begin(one, 0)
    assert refusal(rates, one, 0) is not None


def test_each_answer_takes_a_place():
    rates, one = Rates(), key(concurrent=4)
    rates.begin(one, 0, 3)
    with pytest.raises(Problem, match="has 3 answers under way, and may have 4") as full:
        rates.begin(one, 0, 2)
    with pytest.raises(Problem, match="16 answers are asked for at once, and key 'one' may have 4") as never:
        rates.begin(one, 0, 16)
    assert (full.value.status, never.value.status) == (429, 400)
    rates.end(one, 3)
    rates.begin(one, 0, 4)
    with pytest.raises(Problem, match="has 4 answers under way, and may have 4"):
        rates.begin(one, 0, 1)


def test_a_refusal_says_when_the_next_is_taken_and_costs_nothing():
    rates, one = Rates(), key(per_minute=4)  # one at once, then one every 15 s
    assert refusal(rates, one, 100.0) is None
    for now in (100.0, 104.0, 110.0):
        refused = refusal(rates, one, now)
        assert refused is not None
        assert refused.retry_after == pytest.approx(115.0 - now)
    assert refusal(rates, one, 115.1) is None


def test_without_limits():
    rates = Rates()
    assert all(refusal(rates, NOBODY, 0) is None for _ in range(1000))


@given(st.lists(st.floats(0, 20), max_size=60), st.sampled_from([2.0, 30.0, 240.0]))
def test_never_more_than_the_rate_and_its_burst(waits: list[float], per_minute: float):
    rates, one, now, times = Rates(), key(per_minute), 0.0, list[float]()
    for wait in waits:
        now += wait
        if refusal(rates, one, now) is None:
            times.append(now)
    for i, first in enumerate(times):
        for count, last in enumerate(times[i:], 1):
            assert count <= max(1.0, per_minute / 4) + (last - first) * per_minute / 60 + 1e-6
