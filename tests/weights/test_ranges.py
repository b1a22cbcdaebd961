"""Ranges without gap or overlap; room on a disk; the pace of a sender."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.weights.models import no_room
from splitinfer.weights.ranges import Pace, Span, is_in, merged, missing, pieces, size

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def bytes_of(spans: list[Span] | tuple[Span, ...]) -> set[int]:
    return {at for span in spans for at in range(*span)}


@given(SPANS, SPANS)
def test_merged_and_missing_are_those_of_sets(wanted: list[Span], here: list[Span]):
    for found, expected in (
        (merged(wanted), bytes_of(wanted)),
        (missing(wanted, here), bytes_of(wanted) - bytes_of(here)),
    ):
        assert bytes_of(found) == expected
        assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
        assert size(found) == len(expected)
    assert all(is_in(span, merged(here)) == (bytes_of([span]) <= bytes_of(here)) for span in wanted)


@given(SPANS, st.integers(1, 5))
def test_pieces_are_bounded_and_leave_nothing_out(spans: list[Span], most: int):
    cut = list(pieces(merged(spans), most))
    assert all(0 < end - begin <= most for begin, end in cut)
    assert merged(cut) == merged(spans)
    assert size(cut) == size(merged(spans))


@pytest.mark.parametrize(
    ("wanted", "stored", "free", "cap", "fits"),
    [
        (10, 0, 10, None, True), (11, 0, 10, None, False), (10, 90, 10**6, 100, True), (11, 90, 10**6, 100, False),
        (0, 200, 10**6, 100, False), (-5, 0, 0, None, True),
    ],
)  # fmt: skip
def test_room(wanted: int, stored: int, free: int, cap: int | None, *, fits: bool):
    assert (no_room(wanted, stored, free, cap, reserve=0) is None) == fits


def test_a_rate_holds_on_average_and_is_not_made_up_for():
    pace, now = Pace(), 100.0
    for _ in range(50):
        now += pace.wait(now, 1000, 1e4)
    assert now == pytest.approx(100.0 + 49 * 0.1)
    assert pace.wait(now + 50, 1000, 1e4) == 0.0
    assert pace.wait(now + 50, 1000, 1e4) == pytest.approx(0.1)
    assert pace.wait(now + 50, 1000, None) == 0.0
