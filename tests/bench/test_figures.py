"""Figures from clock readings: known ones, and what must hold for any."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.bench.figures import Run, ratios, summarize, throughput
from splitinfer.bench.report import print_found
from splitinfer.errors import ConfigError


def rate(*token_times: list[float]) -> float:
    return throughput([Run(tuple(range(len(times))), tuple(times)) for times in token_times])


def test_several_trials_are_one_figure() -> None:
    found = summarize([3.0, 1.0, 2.0])
    assert (found["median"], found["low"], found["high"], found["values"]) == (2.0, 1.0, 3.0, [3.0, 1.0, 2.0])
    assert ratios([3.0, 8.0], [1.0, 4.0])["values"] == [3.0, 2.0]


def test_the_first_token_is_no_part_of_a_rate() -> None:
    found = Run((1, 2, 3, 4), (5.0, 5.5, 6.0, 8.0))
    assert (found.ttft, found.tokens_per_second) == (5.0, 1.0)


def test_the_window_worked_out_by_hand() -> None:
    """The second begins two seconds later; both have a token a second, and all decode from 5 to 8."""
    assert rate([1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10]) == 2
    assert rate([1, 9, 10, 11, 12, 13], [9, 10, 11, 12, 13, 14]) == 2, "while prompts are read nothing is counted"


@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=9), st.integers(8, 30), st.integers(0, 3), st.floats(0.01, 10))
def test_where_a_step_lies_in_its_round_does_not_matter(
    places: list[float], tokens: int, later: int, period: float
) -> None:
    """Everybody has one token a round, at any place in it, and may begin some rounds later."""
    times = [
        [period * (place + step + later * (i % 2)) for step in range(tokens + later)] for i, place in enumerate(places)
    ]
    assert rate(*times) == pytest.approx(len(places) / period, rel=1e-6)


def test_answers_that_never_all_go_on_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 answers of 5 tokens never all went on at once.*--decode-tokens"):
        rate([1, 2, 3, 4, 5], [8, 9, 10, 11, 12])


def test_what_could_not_be_measured_is_null_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_found({"ratio": math.nan, "rates": (1.0, math.inf)}, [])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"ratio": None, "rates": [1.0, None]}
