"""Counts by bounds: what a program that scrapes them computes, and quantiles that are right within a bound."""

import math

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.histogram import BETWEEN_TOKENS, FIRST_TOKEN, SECONDS, Histogram


def filled(values: list[float], bounds: tuple[float, ...] = SECONDS) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(st.floats(1e-6, 3600.0), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_within_three_percent(values: list[float], share: float):
    histogram = filled(values)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert abs(histogram.quantile(share) - exact) <= 0.03 * exact
    assert (histogram.longest, histogram.count) == (max(values), len(values))
    assert math.isclose(histogram.total, sum(values))


@given(st.lists(st.floats(0, 100)), st.sampled_from([FIRST_TOKEN, BETWEEN_TOKENS]))
def test_fewer_bounds_have_the_counts_of_the_values(values: list[float], bounds: tuple[float, ...]):
    assert filled(values).up_to(bounds) == [sum(value <= bound for value in values) for bound in bounds]


def test_a_value_that_equals_a_bound_is_up_to_it():
    assert filled([0.1, 0.5, 0.6, 4, 9], (0.5, 1, 4)).up_to((0.5, 1, 4)) == [2, 3, 4]


def test_a_reading_stays_as_it_is():
    counted = filled([0.5])
    read = counted.copy()
    counted.add(1.0)
    assert (read.count, read.total, read.longest) == (1, 0.5, 0.5)
