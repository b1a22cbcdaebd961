"""Quantiles are right within a bucket, whatever was added; memory is bounded."""

import math

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.histogram import LogHistogram


def filled(values: list[float]) -> LogHistogram:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(st.floats(1e-6, 3600.0), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_within_three_percent(values: list[float], share: float):
    histogram = filled(values)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert abs(histogram.quantile(share) - exact) <= 0.03 * exact
    assert histogram.longest == max(values)
    assert math.isclose(histogram.total, sum(values))
    assert histogram.count == len(values)


def test_many_durations_take_little_memory():
    histogram = filled([1e-7 * 1.0007**i for i in range(50_000)] + [0.0, -1.0, 1e300])
    assert len(histogram._buckets) <= 901
    assert histogram.quantile(1.0) == 1e300


def test_plain_numbers():
    assert filled([0.25]).as_dict(50, 99) == {"count": 1, "p50": 0.25, "p99": 0.25, "max": 0.25}
