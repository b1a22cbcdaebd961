"""When a worker's part of a step was, on the coordinator's clock.

A worker's monotonic clock begins anywhere. A step shows by how much it is ahead: the step was on its ways while no
stage had it, from the first stage's sending to the result's arrival, and each way is taken to be as long as the others.
That is wrong by half of all of them at most. So the step that took least is gone by, mostly one of a few rows, whose
ways are alike, until clocks may have drifted apart by as much as another one would be wrong.
"""

from collections.abc import Sequence as Seq

from splitinfer.core.plan import StageFigures

_DRIFT = 1e-4  # seconds a second, that clocks drift apart at most


class Arrivals:
    """Puts the frames of steps on the first stage's clock."""

    def __init__(self) -> None:
        self._ahead: Seq[float] = ()  # by which each worker's clock is
        self._wrong = self._heard = 0.0  # by how much that may be wrong, and since when

    def of(self, figures: Seq[StageFigures], heard: float) -> list[float]:
        """When each worker received a step whose result was heard at ``heard``: none before it was sent, and early
        enough for what follows. ``figures``: of all stages."""
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
