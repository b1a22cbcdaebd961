r"""Every stage's times on one clock: the coordinator's.

A monotonic clock begins anywhere, so a worker's readings mean nothing here until its offset is known. It is
asked for the time when the pipeline is opened, as in NTP:

    coordinator   asked                      heard       way     (heard - asked) - (told - received)
                       \                    /             offset  ((received - asked) + (told - heard)) / 2
    worker              received ---- told               which is wrong by half the way at most

The answer with the least way wins. Clocks drift apart afterwards, by milliseconds in minutes, but steps are
exchanges, too: what was received had been sent before. A step with less way than the reading in force replaces it,
and an offset that says that something was received before it was sent is moved, as little as possible. So it never
errs by more than the quickest frames lately took (``Clocks.follow``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitinfer.core.plan import StageFigures


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A worker's clock minus the coordinator's, in seconds, and how wrong that may be."""

    offset: float
    uncertainty: float


OWN = ClockReading(0.0, 0.0)


def exchange(asked: float, received: float, told: float, heard: float) -> ClockReading:
    """What one question and answer say; ``received`` and ``told`` on the worker's clock.

    A worker 100 s ahead; 2 ms there, 1 ms to answer, 4 ms back. Half of what the ways differ by is the error.

    >>> reading = exchange(asked=5.0, received=105.002, told=105.003, heard=5.007)
    >>> round(reading.offset, 6), round(reading.uncertainty, 6)
    (99.999, 0.003)
    """
    way = (heard - asked) - (told - received)
    return ClockReading(((received - asked) + (told - heard)) / 2, max(way, 0.0) / 2)


def best(readings: Iterable[ClockReading]) -> ClockReading:
    """The one with the least way."""
    return min(readings, key=lambda reading: reading.uncertainty)


class Clocks:
    """The clocks of all stages, the coordinator's own first; ``workers`` as they were read at opening."""

    def __init__(self, workers: Iterable[ClockReading]) -> None:
        self.readings = [OWN, *workers]

    def here(self, stage: int, time: float) -> float:
        """A stage's time on the coordinator's clock."""
        return time - self.readings[stage].offset

    def follow(self, figures: Sequence[StageFigures], heard: float) -> None:
        """Learn from one step, of which every stage says when it received and sent it.

        With offsets o, o[k] lies between two bounds, because no frame arrives before it was sent:

            received[k] - o[k] >= sent[k-1] - o[k-1]        and for the last stage        sent - o <= heard
        """
        lowest, highest = self._lowest(figures, heard), 0.0
        for k in range(1, len(figures)):
            way = figures[k].received - figures[k - 1].sent
            highest += way
            room = max(highest - lowest[k], 0.0)
            if room / 2 < self.readings[k].uncertainty:
                self.readings[k] = ClockReading((highest + lowest[k]) / 2, room / 2)
            offset = self.readings[k].offset
            after_its_sender = self.readings[k - 1].offset + way
            if not lowest[k] <= offset <= after_its_sender:
                self.readings[k] = ClockReading(min(max(offset, lowest[k]), after_its_sender), room)

    def _lowest(self, figures: Sequence[StageFigures], heard: float) -> list[float]:
        """The least offset of each stage, from the last one's to the first one's."""
        bound = figures[-1].sent - heard
        bounds = [bound]
        for k in range(len(figures) - 2, -1, -1):
            bound -= figures[k + 1].received - figures[k].sent
            bounds.append(bound)
        return bounds[::-1]
