r"""Every stage's times on one clock: the coordinator's.

A monotonic clock begins anywhere, so a worker's times mean nothing here until its offset is known. The worker is
asked for its time when the pipeline is opened, as in NTP:

    coordinator   sent                          returned     delay   (returned - sent) - (replied - received)
                      \                        /             offset  ((received - sent) + (replied - returned)) / 2
    worker             received ------ replied               which is wrong by half the delay at most

The answer with the least delay is used. Clocks drift apart afterwards, by milliseconds in minutes, but steps are
exchanges, too: a frame is received after it was sent. A step with less delay than the current reading replaces it,
and an offset by which a frame was received before it was sent is corrected, as little as possible. So the error is
never larger than the delay of the quickest recent frames (``Clocks.follow``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitinfer.core.plan import StageFigures


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A worker's clock minus the coordinator's, in seconds, and by how much that may be wrong."""

    offset: float
    uncertainty: float


OWN = ClockReading(0.0, 0.0)


def exchange(sent: float, received: float, replied: float, returned: float) -> ClockReading:
    """The reading from one exchange. ``replied`` and ``received`` are on the worker's clock.

    Example: the worker is 100 s ahead; 2 ms there, 1 ms to answer, 4 ms back. The error is half of the difference
    between the two ways.

    >>> reading = exchange(sent=5.0, received=105.002, replied=105.003, returned=5.007)
    >>> round(reading.offset, 6), round(reading.uncertainty, 6)
    (99.999, 0.003)
    """
    delay = (returned - sent) - (replied - received)
    return ClockReading(((received - sent) + (replied - returned)) / 2, max(delay, 0.0) / 2)


def best(readings: Iterable[ClockReading]) -> ClockReading:
    """The reading with the least delay."""
    return min(readings, key=lambda reading: reading.uncertainty)


class Clocks:
    """The clocks of all stages, the coordinator's first. ``workers``: their readings when the pipeline was opened."""

    def __init__(self, workers: Iterable[ClockReading]) -> None:
        self.readings = [OWN, *workers]

    def here(self, stage: int, time: float) -> float:
        """Convert a stage's time to the coordinator's clock."""
        return time - self.readings[stage].offset

    def follow(self, figures: Sequence[StageFigures], returned: float) -> None:
        """Refine the readings by one step's figures. ``returned``: when its result came, on the coordinator's clock.

        With offsets o, o[k] lies between two bounds, because no frame arrives before it was sent:

            received[k] - o[k] >= sent[k-1] - o[k-1]        and for the last stage        sent - o <= returned
        """
        lowest, highest = self._lowest(figures, returned), 0.0
        for k in range(1, len(figures)):
            delay = figures[k].received - figures[k - 1].sent
            highest += delay
            room = max(highest - lowest[k], 0.0)
            if room / 2 < self.readings[k].uncertainty:
                self.readings[k] = ClockReading((highest + lowest[k]) / 2, room / 2)
            offset = self.readings[k].offset
            after_its_sender = self.readings[k - 1].offset + delay
            if not lowest[k] <= offset <= after_its_sender:
                self.readings[k] = ClockReading(min(max(offset, lowest[k]), after_its_sender), room)

    def _lowest(self, figures: Sequence[StageFigures], returned: float) -> list[float]:
        """The least possible offset of each stage, by the frames after it."""
        bound = figures[-1].sent - returned
        bounds = [bound]
        for k in range(len(figures) - 2, -1, -1):
            bound -= figures[k + 1].received - figures[k].sent
            bounds.append(bound)
        return bounds[::-1]
