"""Many sequences: the window in which all decode, and what is counted in it."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.bench.shared import throughput
from splitinfer.bench.shared.throughput import BatchRun, step_seconds
from splitinfer.errors import ConfigError


def run(*token_times: list[float]) -> BatchRun:
    return BatchRun(tuple(tuple(range(len(times))) for times in token_times), tuple(map(tuple, token_times)))


def test_the_window_worked_out_by_hand() -> None:
    """The second begins two seconds later; both have a token a second, and all decode from 5 to 8."""
    found = run([1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10])
    assert (found.start, found.end) == (5, 8)
    assert found.tokens_per_second == 2
    assert found.itl == (1,) * 6
    assert (found.last_ttft, found.seconds) == (3, 10)
    found.check()
    paused = run([1, 9, 10, 11, 12, 13], [9, 10, 11, 12, 13, 14])
    assert (paused.tokens_per_second, paused.itl) == (2, (1,) * 4), "while prompts are read nothing is counted"


@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=9), st.integers(8, 30), st.integers(0, 3), st.floats(0.01, 10))
def test_where_a_step_lies_in_its_round_does_not_matter(
    places: list[float], tokens: int, later: int, period: float
) -> None:
    """Everybody has one token a round, at any place in it, and may begin some rounds later."""
    times = [
        [period * (place + step + later * (i % 2)) for step in range(tokens + later)] for i, place in enumerate(places)
    ]
    assert run(*times).tokens_per_second == pytest.approx(len(places) / period, rel=1e-6)


def test_answers_that_never_all_go_on_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 answers of 5 tokens never all went on at once.*--stream-tokens"):
        run([1, 2, 3, 4, 5], [8, 9, 10, 11, 12]).check()


def test_seconds_of_a_step() -> None:
    window = {"steps": 4, "stages": [{"busy_seconds": 2.0}, {"busy_seconds": 1.0}]}
    assert step_seconds(window) == (0.5, 0.25)
    assert doctest.testmod(throughput).failed == 0
