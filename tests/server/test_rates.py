"""How much a key may ask, and what a refusal costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.server.keys import ApiKey, Rates
from splitinfer.server.problem import Problem


def key(per_minute: float | None = None, concurrent: int | None = None) -> ApiKey:
    return ApiKey("one", "0" * 64, requests_per_minute=per_minute, concurrent=concurrent)


def refusal(rates: Rates, one: ApiKey, now: float) -> Problem | None:
    try:
        rates.begin(one, now)
    except Problem as problem:
        return problem
    return None


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
    assert f"{refusal(rates, one, 0)}" == "key 'one' has 4 answers under way, and may have 4"


def test_five_a_minute_are_five_at_once_and_then_one_each_12_s():
    rates, one = Rates(), key(per_minute=5)
    assert [refusal(rates, one, 100.0) for _ in range(5)] == [None] * 5
    for now in (100.0, 104.0, 110.0):  # a refusal says when the next is taken, and costs nothing
        refused = refusal(rates, one, now)
        assert refused.retry_after == pytest.approx(112.0 - now)
        assert str(refused) == f"key 'one' may make 5 a minute; the next one in {112 - now:.0f} s"
    for now in (112.1, 124.1):
        assert refusal(rates, one, now) is None
        assert refusal(rates, one, now) is not None
    assert [refusal(rates, one, 500.0) for _ in range(6)].count(None) == 5, "a pause saves up a minute's, not more"


@given(st.lists(st.floats(0, 20), max_size=60), st.sampled_from([0.5, 2.0, 30.0, 240.0]))
def test_never_more_than_the_rate_and_its_burst(waits: list[float], per_minute: float):
    rates, one, now, times = Rates(), key(per_minute), 0.0, list[float]()
    for wait in waits:
        now += wait
        if refusal(rates, one, now) is None:
            times.append(now)
    for i, first in enumerate(times):
        for count, last in enumerate(times[i:], 1):
            assert count <= max(1.0, per_minute) + (last - first) * per_minute / 60 + 1e-6
