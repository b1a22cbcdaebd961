"""Losses, stalls and patience, on a clock that is an argument."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.liveness import LossCounter, RejoinDeadline, limit_of
from splitinfer.core.plan import Fetch, Slice, StageFigures, StepPlan
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.scheduler import Scheduler
from tests.core.given_costs import GivenCosts, line


class Steps:
    """Steps in flight under a detector."""

    def __init__(self) -> None:
        self._answered_at, self._in_flight = float("-inf"), deque[tuple[StepInFlight, float]]()

    def sent(self, now: float, predicted: float | None) -> None:
        """A step is launched."""
        step = StepInFlight(StepPlan(0))
        step.launched_at = now
        self._in_flight.append((step, limit_of(predicted)))

    def answered(self, now: float) -> None:
        """The oldest step is back."""
        self._in_flight.popleft()
        self._answered_at = now

    def is_stuck(self, now: float) -> bool:
        """Whether the oldest step is stuck."""
        return any(step.is_stuck(limit, self._answered_at, now) for step, limit in [*self._in_flight][:1])


@pytest.mark.parametrize(("predicted", "limit"), [(0.0, 20.0), (0.08, 20.08), (25.0, 45.0), (None, 120.0)])
def test_a_step_may_take_twenty_seconds_more_than_predicted_and_two_minutes_if_nothing_is(
    predicted: float | None, limit: float
):
    steps = Steps()
    steps.sent(5.0, predicted)
    assert not steps.is_stuck(5.0 + limit - 0.1)
    assert steps.is_stuck(5.0 + limit + 0.1)


def test_a_step_that_is_not_launched_yet_is_not_stuck():
    assert not StepInFlight(StepPlan(0)).is_stuck(20.0, 0.0, 1000.0)


def test_every_answer_starts_the_wait_for_the_next():
    steps = Steps()
    steps.sent(0.0, 0.1)
    steps.sent(8.0, 20.0)  # another step goes out; the first is still the oldest
    assert not steps.is_stuck(20.0)
    assert steps.is_stuck(20.2)
    steps.answered(21.0)  # late, but there
    assert not steps.is_stuck(60.9)
    assert steps.is_stuck(61.1)
    steps.answered(61.2)
    assert not steps.is_stuck(1000.0)
    steps.sent(1000.0, 0.1)
    assert not steps.is_stuck(1019.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 60.0), st.floats(0, 1.0)), min_size=1, max_size=30))
def test_a_pipeline_that_goes_on_as_predicted_is_never_stuck(steps: list[tuple[float, float, float]]):
    """However many steps stand in line: (seconds until the next is sent, predicted, share of that it takes)."""
    watched, now, events = Steps(), 0.0, list[tuple[float, int, float]]()
    returned = 0.0
    for pause, predicted, share in steps:
        events.append((now, 0, predicted))
        returned = max(now, returned) + share * predicted
        events.append((returned, 1, 0.0))
        now += pause
    for at, is_answer, predicted in sorted(events, key=lambda event: event[:2]):
        assert not watched.is_stuck(at - 1e-6)
        if is_answer:
            watched.answered(at)
        else:
            watched.sent(at, predicted)


DECODES, CHUNK = (Slice(1, 5000, (7,), 1),), (Slice(1, 0, (7,) * 512, 0),)


class Watched:
    """Steps through two stages of a machine, one after another, with the limits that follow from those before."""

    def __init__(self) -> None:
        self.costs, self.now = CostModel.of(2), 0.0

    def stuck_after(self, slices: tuple[Slice, ...]) -> float:
        """Seconds after which a step counts as stuck."""
        return limit_of(self.costs.predicted(Shape.of(slices)))

    def step(self, slices: tuple[Slice, ...], seconds: float) -> None:
        """A step that takes ``seconds`` on each stage; it must not count as stuck."""
        assert 2 * seconds < self.stuck_after(slices), f"a step of {2 * seconds} s"
        rows, middle = Shape.of(slices).rows, self.now + seconds
        figures = [
            StageFigures(0, self.now, middle, rows=rows),
            StageFigures(1, middle, middle + seconds, received=middle, rows=rows),
        ]
        self.now = middle + seconds
        self.costs.learn(slices, figures, returned_at=self.now)


def test_after_decodes_a_first_chunk_of_twenty_seconds_is_no_reason():
    watched = Watched()
    for _ in range(50):
        watched.step(DECODES, 0.04)
    assert watched.stuck_after(DECODES) == pytest.approx(20.08, abs=0.05)
    assert watched.stuck_after(CHUNK) == 120.0
    for _ in range(8):
        watched.step(CHUNK, 10.0)
    assert 40.0 <= watched.stuck_after(CHUNK) <= 51.0, "what it takes by now, the margin, and 20 s"
    assert watched.stuck_after(DECODES) < 23.0, "decodes are as short as they were"


def test_a_chunk_far_behind_all_seen_before_is_not_known():
    watched = Watched()
    for start in (0, 0, 0, 0, 0):
        watched.step((Slice(1, start, (7,) * 512, 0),), 1.0)
    assert watched.stuck_after((Slice(1, 256, (7,) * 512, 0),)) < 30.0
    assert watched.stuck_after((Slice(1, 50_000, (7,) * 512, 0),)) == 120.0, "it attends to what was kept"


def test_nothing_is_predicted_of_reading_disks():
    costs = GivenCosts([line(0.01, 0.001)])
    scheduler = Scheduler(SchedulerConfig(1, 1, 512, 8, 4096), costs)
    assert scheduler.predicted(StepPlan(0, slices=CHUNK)) == pytest.approx(1.02 * 0.522)
    assert scheduler.predicted(StepPlan(0, slices=CHUNK, fetches=(Fetch(0, b"key", 0, 256),))) is None


def test_losses_without_a_token_in_between_are_not_waited_for_for_ever() -> None:
    losses = LossCounter()
    assert [losses.another(7) for _ in range(4)] == [True, True, True, False]
    assert losses.another(8)


def test_patience_runs_only_while_somebody_waits() -> None:
    patience = RejoinDeadline(60.0, None)
    assert not patience.is_over(0.0, anybody_waits=False)
    assert not patience.is_over(1000.0, anybody_waits=True)
    assert not patience.is_over(1059.0, anybody_waits=True)
    assert patience.is_over(1060.0, anybody_waits=True)
    assert not patience.is_over(1061.0, anybody_waits=False)
    assert not patience.is_over(1062.0, anybody_waits=True)
