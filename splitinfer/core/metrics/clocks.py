"""How far a worker's clock is from the coordinator's, as ``doctor`` shows it.

A monotonic clock begins anywhere. The worker is asked for its time, as in NTP:

    coordinator   sent                          returned     delay   (returned - sent) - (replied - received)
                      \\                        /             offset  ((received - sent) + (replied - returned)) / 2
    worker             received ------ replied               which is wrong by half the delay at most

The answer with the least delay is used.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A worker's clock minus the coordinator's, in seconds, and by how much that may be wrong."""

    offset: float
    uncertainty: float


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
