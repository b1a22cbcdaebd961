"""Gaps by cause: hand-worked ones, and what must add up for any."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.gaps import ALWAYS, Activity, Cause, StageTime, Visit, split

UP, DOWN, LINK, HOST, NOTHING = Cause.UPSTREAM, Cause.DOWNSTREAM, Cause.LINK, Cause.HOST, Cause.NOTHING


def active(*spells: tuple[float, float]) -> Activity:
    activity = Activity()
    for start, end in spells:
        activity.begin(start)
        activity.stop(end)
    return activity


def seconds(stage: StageTime) -> dict[Cause, float]:
    return {cause: each for cause, each in stage.idle.items() if each}


def test_every_mark_lies_in_the_gap():
    """A gap from 10 to 20.

    10 ....... 14 ... 15 ..... 18 ... 20
       upstream  host    link    host          4 + 1 + 3 + 2 = 10
    """
    assert split(10, Visit(made=14, sent=15, received=18, start=20, end=25), UP) == {UP: 4, HOST: 3, LINK: 3}


def test_marks_before_the_gap_cost_nothing():
    """Sent at 8, received at 12, so 2 of the 4 s on the link were spent on the step before; 1 s for Python."""
    assert split(10, Visit(made=7, sent=8, received=12, start=13, end=14), UP) == {LINK: 2, HOST: 1}
    assert split(10, Visit(made=7, sent=8, received=9, start=10.5, end=14), UP) == {HOST: 0.5}
    assert split(10, Visit(made=7, sent=8, received=9, start=10, end=14), UP) == {}


def test_what_was_never_waited_for_is_the_host_s():
    assert split(10, Visit(ALWAYS, ALWAYS, ALWAYS, start=11, end=12), DOWN) == {HOST: 1}


def test_without_requests_there_is_no_gap():
    """Requests from 0 to 4 and from 10 to 16. The stage computes 1-3 and 12-13.

    Gap 3-12: 1 s until the first request ended, in which no step was to come; 6 s without requests, which do not
    count; 2 s of the second request, 1.5 of them upstream and 0.5 on the link.
    """
    activity, stage = active((0, 4), (10, 16)), StageTime(UP, 0.0)
    stage.add(Visit(1, 1, 1, 1, 3), activity)
    assert stage.add(Visit(11.5, 11.5, 12, 12, 13), activity) == {NOTHING: 1, UP: 1.5, LINK: 0.5}
    assert (stage.busy, sum(stage.idle.values())) == (3, 4)
    assert activity.seconds(0, 13) == 7


def test_spells_under_way():
    activity = active((1, 2), (4, 6))
    activity.begin(8)
    activity.begin(9)
    assert activity.within(1.5, 10) == [(1.5, 2), (4, 6), (8, 10)]
    activity.forget(2)
    assert activity.within(0, 5) == [(4, 5)]


marks = st.floats(0, 100) | st.just(ALWAYS)


@given(st.floats(0, 100), marks, marks, marks, st.floats(0, 100), st.sampled_from([UP, DOWN]))
def test_causes_add_up_to_the_gap(since: float, made: float, sent: float, received: float, start: float, first: Cause):
    """Also where the marks contradict each other."""
    gap = split(since, Visit(made, sent, received, start, start + 1), first)
    assert math.isclose(sum(gap.values()), max(0.0, start - since), abs_tol=1e-9)
    assert all(value > 0 for value in gap.values())


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), max_size=8),
    st.lists(st.tuples(st.floats(-1, 3), st.floats(0, 3)), max_size=12),
    st.floats(0, 20),
    st.randoms(use_true_random=False),
)
def test_busy_and_gaps_are_all_the_time_under_way(
    spells: list[tuple[float, float]], steps: list[tuple[float, float]], since: float, chance: random.Random
):
    """Spells as (pause before, length); steps as (gap before, length), overlapping where the gap is negative."""
    activity, now = Activity(), 0.0
    for pause, length in spells:
        activity.begin(now + pause)
        now += pause + length
        activity.stop(now)
    stage, at = StageTime(UP, since), 0.0
    for gap, length in steps:
        start = max(0.0, at + gap)
        stage.add(Visit(*(chance.uniform(-1, 40) for _ in range(3)), start, start + length), activity)
        at = start + length
        assert math.isclose(stage.busy + sum(stage.idle.values()), activity.seconds(since, stage.until), abs_tol=1e-6)
