"""Offsets from questions and from steps: right within what is said of them, and never against causality."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.clocks import ClockReading, Clocks, best, exchange
from splitinfer.core.plan import StageFigures

ways = st.floats(1e-5, 0.05)


@given(st.floats(-1e5, 1e5), ways, ways, ways)
def test_a_reading_is_right_within_its_uncertainty(offset: float, there: float, back: float, answering: float):
    asked = 1000.0
    received = asked + there + offset
    told = received + answering
    reading = exchange(asked, received, told, told - offset + back)
    assert abs(reading.offset - offset) <= reading.uncertainty + 1e-9
    assert math.isclose(reading.uncertainty, (there + back) / 2, abs_tol=1e-9)


def test_the_least_way_wins():
    """50 ms to and fro says less than 1 ms."""
    far, near = ClockReading(7.02, 0.025), ClockReading(7.0, 0.0005)
    assert best([far, near, far]) == near


def step(offsets: list[float], begin: float, ways: list[float], back: float) -> tuple[list[StageFigures], float]:
    """A step's figures, each on its stage's clock, and when its result was heard; 10 ms on each stage."""
    figures, now = [], begin
    for i, (offset, way) in enumerate(zip([0.0, *offsets], [0.0, *ways], strict=True)):
        received = now + way
        ended = received + 0.01
        times = (received + offset, ended + offset)
        figures.append(StageFigures(i, *times, received=times[0], sent=times[1]))
        now = ended
    return figures, now + back


def test_drift_is_followed_as_far_as_frames_tell():
    """Clocks that run apart by 50 ppm, for an hour: 180 ms. Frames take 1 ms each way, so that is the most it errs."""
    clocks = Clocks([ClockReading(20.0, 0.0005)])
    for second in range(3600):
        offset = 20.0 + 50e-6 * second
        clocks.follow(*step([offset], float(second), [0.001], 0.001))
        assert abs(clocks.readings[1].offset - offset) <= 0.001 + 1e-9
    assert 0.001 - 1e-9 <= clocks.readings[1].uncertainty <= 0.002 + 1e-9


def test_a_reading_that_agrees_with_the_steps_stays():
    clocks = Clocks([ClockReading(20.0004, 0.0005)])
    clocks.follow(*step([20.0], 5.0, [0.001], 0.001))
    assert clocks.readings == [ClockReading(0.0, 0.0), ClockReading(20.0004, 0.0005)]


def test_a_step_with_less_way_replaces_a_reading():
    """Read over 50 ms of way; a step took 1 ms there and 3 ms back: 2 ms of doubt, and 1 ms of error."""
    clocks = Clocks([ClockReading(20.02, 0.025)])
    clocks.follow(*step([20.0], 5.0, [0.001], 0.003))
    assert clocks.readings[1].offset == pytest.approx(19.999)
    assert clocks.readings[1].uncertainty == pytest.approx(0.002)


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(-0.2, 0.2), ways), min_size=1, max_size=4),
    ways,
)
def test_no_frame_arrives_before_it_was_sent(stages: list[tuple[float, float, float]], back: float):
    """However wrong the readings were: (true offset, error of its reading, way there) for each worker."""
    offsets, errors, forth = zip(*stages, strict=True)
    clocks = Clocks(ClockReading(o + e, 0.1) for o, e in zip(offsets, errors, strict=True))
    figures, heard = step(list(offsets), 50.0, list(forth), back)
    clocks.follow(figures, heard)
    for k in range(1, len(figures)):
        assert clocks.here(k, figures[k].received) >= clocks.here(k - 1, figures[k - 1].sent) - 1e-9
        assert abs(clocks.readings[k].offset - offsets[k - 1]) <= sum(forth) + back + 1e-9
    assert clocks.here(len(figures) - 1, figures[-1].sent) <= heard + 1e-9
