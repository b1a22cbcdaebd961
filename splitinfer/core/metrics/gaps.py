"""Why a stage stood still: the gap before each of its steps, split by cause.

All times are seconds on one clock. A step reaches a stage in four marks:

    ... end of the step before |  made    sent   received   start
                               |---|-------|--------|---------|
                           waits for   host   link     host

*made*: the stage before has finished it; *sent*: it is sent; *received*: it has arrived; *start*: it runs. Marks before
the gap cost nothing. The first stage does not wait for a step but for a result, so that it can plan the next step. Its
marks are the result's, and its cause of waiting is *downstream*, not *upstream*.

Only time with a request under way counts. If all requests ended during a gap, the part before their end had no step to
wait for: *nothing to do*. So the time under way, up to the end of a stage's last step, is:

    busy + upstream + downstream + link + host + nothing_to_do
"""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from splitinfer.core.plan import StageFigures

ALWAYS = -math.inf  # the time of an event that was never waited for
_MOST_SPELLS = 256  # kept for a stage that has not run for a long time


class Cause(StrEnum):
    """Why a stage was idle. The values are public."""

    UPSTREAM = "upstream"  # the stage before had not finished the step
    DOWNSTREAM = "downstream"  # the first stage had to wait for a result to plan anything
    LINK = "link"  # on its way between two stages
    HOST = "host"  # received and not started, or finished and not sent: planning, sampling, serialising
    NOTHING = "nothing_to_do"  # no further step came before all requests had ended


class Visit(NamedTuple):  # made for every stage in every step; a dataclass takes three times as long
    """One step on one stage, with the marks above."""

    made: float
    sent: float
    received: float
    start: float
    end: float


def split(since: float, visit: Visit, waits_for: Cause) -> dict[Cause, float]:
    """Split the gap from ``since`` to the visit's start into seconds by cause."""
    marks = (
        (visit.made, waits_for),
        (visit.sent, Cause.HOST),
        (visit.received, Cause.LINK),
        (visit.start, Cause.HOST),
    )
    seconds: dict[Cause, float] = {}
    at = since
    for mark, cause in marks:
        until = min(mark, visit.start)
        if until > at:
            seconds[cause] = seconds.get(cause, 0.0) + until - at
            at = until
    return seconds


class Activity:
    """Records the spells during which some request was under way."""

    def __init__(self) -> None:
        self._spells: deque[tuple[float, float]] = deque(maxlen=_MOST_SPELLS)
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Note that a request is under way. Changes nothing if one already was."""
        self._since = now if self._since is None else self._since

    def stop(self, now: float) -> None:
        """Note that no request is under way any more."""
        if self._since is not None:
            self._spells.append((self._since, now))
            self._since = None

    def within(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of [start, end) during which a request was under way, in order."""
        if self._since is not None and self._since <= start < end:
            return [(start, end)]
        now = () if self._since is None else ((self._since, math.inf),)
        return [(max(a, start), min(b, end)) for a, b in (*self._spells, *now) if max(a, start) < min(b, end)]

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds of [start, end) during which a request was under way."""
        return sum(b - a for a, b in self.within(start, end))

    def forget(self, before: float) -> None:
        """Forget the spells that ended at ``before`` or earlier."""
        while self._spells and self._spells[0][1] <= before:
            self._spells.popleft()


@dataclass(slots=True)
class StageTime:
    """One stage's time under way up to ``until``, the end of its last step: seconds ``busy``, and ``idle`` by cause.
    ``waits_for``: upstream or downstream."""

    waits_for: Cause
    until: float
    busy: float = 0.0
    idle: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    def add(self, visit: Visit, activity: Activity) -> dict[Cause, float]:
        """Add the next step. Return the gap before it by cause. Time before ``until`` does not count."""
        if visit.end <= self.until:
            return {}
        start = max(visit.start, self.until)
        gap = self._gap(visit, start, activity)
        for cause, seconds in gap.items():
            self.idle[cause] += seconds
        self.busy += activity.seconds(start, visit.end)
        self.until = visit.end
        return gap

    def _gap(self, visit: Visit, start: float, activity: Activity) -> dict[Cause, float]:
        if start <= self.until:
            return {}
        spells = activity.within(self.until, start)
        gap: dict[Cause, float] = {}
        if spells and spells[-1][1] == start:  # the step belongs to this spell, and was waited for in it
            gap = split(spells.pop()[0], visit, self.waits_for)
        if spells:
            gap[Cause.NOTHING] = sum(b - a for a, b in spells)
        return gap


_DRIFT = 1e-4  # seconds per second that clocks drift apart at most


class Arrivals:
    """Puts the arrivals of steps on the first stage's clock.

    A worker's monotonic clock begins anywhere. A step shows how far it is ahead: between the first stage's sending and
    the result's arrival, the step was on a link whenever no stage had it. Each trip is assumed to take equally long,
    which is wrong by at most half of all trips together. So the step with the shortest trips counts, usually one of a
    few rows, whose trips are alike. Another step replaces it once the clocks may have drifted apart by more than that
    step's error.
    """

    def __init__(self) -> None:
        self._ahead: Seq[float] = ()  # seconds that each worker's clock is ahead
        self._wrong = self._heard = 0.0  # the error that ``_ahead`` may have, and when it was measured

    def of(self, figures: Seq[StageFigures], heard: float) -> list[float]:
        """Return when each worker received the step whose result was heard at ``heard``. No time is before the step was
        sent, or too late for the rest of its trip. ``figures``: all stages'."""
        sent, workers = figures[0].sent, figures[1:]
        latest = heard - sum(each.sent - each.received for each in workers)
        ways = latest - sent
        if ways / 2 <= self._wrong + _DRIFT * (heard - self._heard) or not self._ahead:
            self._wrong, self._heard, self._ahead = ways / 2, heard, _clocks_ahead(workers, sent, ways / len(figures))
        found: list[float] = []
        for each, ahead in zip(workers, self._ahead, strict=True):
            found.append(min(max(each.received - ahead, sent), latest))
            sent, latest = (at + each.sent - each.received for at in (found[-1], latest))
        return found


def _clocks_ahead(workers: Seq[StageFigures], sent: float, way: float) -> list[float]:
    found: list[float] = []
    for each in workers:
        found.append(each.received - sent - way)
        sent = each.sent - found[-1]
    return found
