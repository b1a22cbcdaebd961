"""Losses, stalls and patience, on a clock that is an argument."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.liveness import LossCounter, RejoinDeadline, StallDetector


def test_a_step_may_take_twenty_times_the_usual_and_ten_seconds_at_least() -> None:
    watch = StallDetector()
    watch.waiting(0.0)
    assert not watch.is_stuck(100.0)  # nobody knows yet what is usual
    watch.answered(0.1, more=False)
    watch.waiting(5.0)
    assert not watch.is_stuck(14.9)
    assert watch.is_stuck(15.1)
    watch.reset()
    assert not watch.is_stuck(1000.0)
    slow = StallDetector(usual=2.0)
    slow.waiting(0.0)
    assert not slow.is_stuck(39.0)
    assert slow.is_stuck(41.0)


def test_every_answer_starts_the_wait_for_the_next() -> None:
    watch = StallDetector(usual=0.1)
    watch.waiting(0.0)
    watch.waiting(8.0)  # another step goes out; the first is still the oldest
    assert watch.is_stuck(11.0)
    watch.answered(11.0, more=True)
    assert not watch.is_stuck(20.0)


@given(st.lists(st.floats(0.01, 5.0), min_size=30, max_size=60))
def test_usual_follows_the_steps(times: list[float]) -> None:
    watch, now = StallDetector(), 0.0
    for took in times:
        watch.waiting(now)
        now += took
        watch.answered(now, more=False)
    assert watch.usual is not None
    assert min(times) - 1e-6 <= watch.usual <= max(times) + 1e-6


def test_losses_without_a_token_in_between_are_not_waited_for_for_ever() -> None:
    losses = LossCounter()
    assert [losses.another(7) for _ in range(4)] == [True, True, True, False]
    assert losses.another(8)


def test_patience_runs_only_while_somebody_waits() -> None:
    patience = RejoinDeadline(60.0)
    assert not patience.is_over(0.0, anybody_waits=False)
    assert not patience.is_over(1000.0, anybody_waits=True)
    assert not patience.is_over(1059.0, anybody_waits=True)
    assert patience.is_over(1060.0, anybody_waits=True)
    assert not patience.is_over(1061.0, anybody_waits=False)
    assert not patience.is_over(1062.0, anybody_waits=True)
