"""Why a stage stood still: the gap before each of its steps, split by cause.

All times are seconds on one clock. A step comes to a stage by four marks:

    ... end of the step before |  made    sent   received   start
                               |---|-------|--------|---------|
                           waits for   host   link     host

*made*: the stage before has finished it; *sent*: it is sent; *received*: it has arrived; *start*: it runs. Marks
before the gap cost nothing. The first stage waits not for a step but for a result that lets it plan the next one,
so its marks are those of that result, and its cause of waiting is *downstream*, not *upstream*.

Only time in which some request is under way counts. A gap during which all requests ended has a part before that in
which no step was to come: *nothing to do*. So, of the time under way, up to the end of a stage's last step:

    busy + upstream + downstream + link + host + nothing_to_do = all of it
"""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from splitinfer.core.plan import StageFigures

ALWAYS = -math.inf  # the time of an event that was never waited for
_MOST_SPELLS = 256  # stored for a stage that has not run for a long time


class Cause(StrEnum):
    """Why a stage was idle. The values are public."""

    UPSTREAM = "upstream"  # the stage before had not finished the step
    DOWNSTREAM = "downstream"  # the first stage had to wait for a result to plan anything
    LINK = "link"  # on its way between two stages
    HOST = "host"  # received and not started, or finished and not sent: planning, sampling, serialising
    NOTHING = "nothing_to_do"  # no step was to come until all requests had ended


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
    """Records the spells in which some request was under way."""

    def __init__(self) -> None:
        self._spells: deque[tuple[float, float]] = deque(maxlen=_MOST_SPELLS)
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Note that a request is under way; changes nothing if one was before."""
        self._since = now if self._since is None else self._since

    def stop(self, now: float) -> None:
        """Note that no request is under way any more."""
        if self._since is not None:
            self._spells.append((self._since, now))
            self._since = None

    def within(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of [start, end) in which a request was under way, in order."""
        if self._since is not None and self._since <= start < end:
            return [(start, end)]
        now = () if self._since is None else ((self._since, math.inf),)
        return [(max(a, start), min(b, end)) for a, b in (*self._spells, *now) if max(a, start) < min(b, end)]

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds of [start, end) in which a request was under way."""
        return sum(b - a for a, b in self.within(start, end))

    def forget(self, before: float) -> None:
        """Forget the spells that ended at ``before`` or earlier."""
        while self._spells and self._spells[0][1] <= before:
            self._spells.popleft()


@dataclass(slots=True)
class StageTime:
    """One stage's time under way up to ``until``, its last step's end: seconds ``busy``, and ``idle`` by cause.
    ``waits_for``: upstream or downstream."""

    waits_for: Cause
    until: float
    busy: float = 0.0
    idle: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    def add(self, visit: Visit, activity: Activity) -> dict[Cause, float]:
        """Add the next step; returns the gap before it by cause. Time before ``until`` does not count."""
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


_DRIFT = 1e-4  # seconds a second, that clocks drift apart at most


class Arrivals:
    """Puts the frames of steps on the first stage's clock.

    A worker's monotonic clock begins anywhere. A step shows by how much it is ahead: the step was on its ways while no
    stage had it, from the first stage's sending to the result's arrival, and each way is taken to be as long as the
    others. That is wrong by half of all of them at most. So the step that took least is gone by, mostly one of a few
    rows, whose ways are alike, until clocks may have drifted apart by as much as another one would be wrong.
    """

    def __init__(self) -> None:
        self._ahead: Seq[float] = ()  # by which each worker's clock is
        self._wrong = self._heard = 0.0  # by how much that may be wrong, and since when

    def of(self, figures: Seq[StageFigures], heard: float) -> list[float]:
        """Return when each worker received a step whose result was heard at ``heard``: none before it was sent, and
        early enough for what follows. ``figures``: of all stages."""
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
