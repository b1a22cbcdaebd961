"""Counts by bounds: what a program that scrapes them computes from two readings."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.distribution import Distribution, Histogram

BOUNDS = (0.5, 1, 4)


def test_a_value_that_equals_a_bound_is_up_to_it():
    counted = Distribution(BOUNDS)
    for value in (0.1, 0.5, 0.6, 4, 9):
        counted.add(value)
    assert counted.read() == Histogram(BOUNDS, (2, 1, 1, 1), 14.2)


@given(values=st.lists(st.floats(0, 100)), most=st.floats(0, 5))
def test_counts_up_to_each_bound_are_those_of_the_values(values: list[float], most: float):
    counted = Distribution(BOUNDS)
    for value in values:
        counted.add(value)
    read = counted.read().up_to(most)
    assert read.bounds == tuple(bound for bound in BOUNDS if bound <= most)
    expected = [sum(value <= bound for value in values) for bound in read.bounds]
    assert read.cumulative == (*expected, len(values))
    assert read.count == len(values)


def test_a_reading_stays_as_it_is():
    counted = Distribution(BOUNDS)
    read = counted.read()
    counted.add(1)
    assert read.count == 0
