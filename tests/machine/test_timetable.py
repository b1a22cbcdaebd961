"""Which steps are timed in the seconds that there are: the most important first, and two numbers of rows at least."""

from collections.abc import Callable

import pytest

from splitinfer.machine.timetable import ORDER, expected, fewest, next_repeat, next_rows


def timed(costs: Callable[[int], float], seconds: float, allowed: tuple[int, ...] = ORDER) -> tuple[list[int], float]:
    """The numbers of rows that are timed on a device, in their order, and the seconds that it took."""
    known, took = dict[int, float](), 0.0
    while (rows := next_rows(known, seconds - took, allowed)) is not None:
        known[rows] = costs(rows)
        took += fewest(costs(rows)) * costs(rows)
    return list(known), took


def test_a_quick_device_is_timed_with_all_rows():
    rows, took = timed(lambda rows: 0.01 + 0.0001 * rows, 2.0)
    assert rows == list(ORDER)
    assert took < 2


@pytest.mark.parametrize(("per_row", "found"), [(0.01, {1, 8, 128, 2, 4}), (0.1, {1, 8, 2, 4})])
def test_a_slow_one_leaves_large_steps_to_lines(per_row: float, found: set[int]):
    rows, took = timed(lambda rows: per_row * rows, 2.4)
    assert set(rows) == found
    assert took <= 2.4


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_two_numbers_of_rows_are_timed_in_any_case(seconds: float):
    assert timed(lambda rows: 1.0 * rows, seconds) == ([1, 2], 3.0)
    assert timed(lambda rows: 1.0 * rows, seconds, (1, 8)) == ([1, 8], 9.0)
    assert timed(lambda rows: 1.0 * rows, seconds, (1,)) == ([1], 1.0)


def test_what_was_not_timed_before_tells_nothing():
    assert set(timed(lambda _: 0.001, 9.0, (1, 128))[0]) == {1, 128}


def test_a_step_is_expected_to_take_what_more_rows_took():
    known = {1: 0.2, 8: 0.5}
    assert [expected(known, rows) for rows in (1, 4, 8)] == [0.2, 0.5, 0.5]
    assert expected(known, 32) == pytest.approx(2.0)
    assert expected({}, 8) == 0


def test_what_is_left_goes_to_those_that_were_timed_least():
    known, counts = {1: 0.01, 8: 0.1, 32: 0.3}, {1: 2, 8: 2, 32: 1}
    found = []
    left = 0.6
    while (rows := next_repeat(known, counts, left)) is not None:
        found.append(rows)
        counts[rows] += 1
        left -= known[rows]
    assert found == [1, 8] * 4, "a long step is not repeated, and no other for ever"
    assert next_repeat(known, {1: 2, 8: 2, 32: 1}, 0.05) == 1
    assert next_repeat(known, {1: 6, 8: 2, 32: 1}, 0.05) is None
