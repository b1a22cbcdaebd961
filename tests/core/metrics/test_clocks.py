"""Readings of a clock: right within what is said of them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.clocks import exchange

ways = st.floats(1e-5, 0.05)


@given(st.floats(-1e5, 1e5), ways, ways, ways)
def test_a_reading_is_right_within_its_uncertainty(offset: float, there: float, back: float, answering: float):
    asked = 1000.0
    received = asked + there + offset
    told = received + answering
    reading = exchange(asked, received, told, told - offset + back)
    assert abs(reading.offset - offset) <= reading.uncertainty + 1e-9
    assert math.isclose(reading.uncertainty, (there + back) / 2, abs_tol=1e-9)
