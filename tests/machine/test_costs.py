"""Costs lie on lines through what was measured, and on the last line beyond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.costs.shape import Shape
from splitinfer.machine.costs import Costs

COSTS = Costs.through({1: 1.0, 8: 2.0, 16: 6.0}, 0.5, 0.25)


def test_between_and_beyond_what_was_measured():
    assert [COSTS.rows(n) for n in (1, 8, 12, 16, 18)] == [1, 2, 4, 6, 7]
    assert COSTS.at(Shape(8, 4, 8)) == 2 + 2 + 2
    assert [each.rows(300) for each in (Costs(), Costs(((1, 3.0),)), Costs.line(1.0, 0.5))] == [0, 3, 151]


@given(st.integers(1, 40), st.floats(0, 5))
def test_sums_and_multiples(rows: int, factor: float):
    other = Costs.through({1: 0.5, 4: 3.0, 32: 4.0})
    shape = Shape(rows, 7, 9)
    assert COSTS.scaled(factor).at(shape) == pytest.approx(factor * COSTS.at(shape))
    assert COSTS.plus(other).at(shape) == pytest.approx(COSTS.at(shape) + other.at(shape))
    assert COSTS.plus(other, 6).at(shape) == pytest.approx(COSTS.at(shape) + other.rows(min(rows, 6)))


@pytest.mark.parametrize("points", [((0, 1.0),), ((1, -1.0),), ((1, 2.0), (8, 1.0)), ((8, 1.0), (1, 0.5))])
def test_costs_that_cannot_be(points: tuple[tuple[int, float], ...]):
    with pytest.raises(ValueError, match=r"."):
        Costs(points)
