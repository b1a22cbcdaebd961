r"""Measures the latency and bandwidth of a link by exchanges timed at one end.

Each exchange is a frame there and a frame back. One frame is large, or both are small:

    small     latency + latency                   half of it is the latency, one way
    down      latency + bytes / down + latency    less a small exchange, this is the time of the bytes
    up        latency + latency + bytes / up

The work of both ends for a frame is included, because a step pays it, too. The number and size of exchanges depend on
how long earlier ones took: about 0.3 s in all.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

MOST_BYTES = 4 * 2**20  # of one frame
_LEAST_BYTES, _GROWTH = 64 * 2**10, 4
_SMALL_BYTES = 64
_NUM_SMALL, _NUM_LARGE = 20, 5
_SMALL_SECONDS, _LARGE_SECONDS = 0.1, 0.07  # after this, no further exchange of that size is made
_HICCUP = 0.5  # seconds that a busy machine may add to one exchange; a shorter one is repeated
_LONG_ENOUGH = 0.02  # seconds for the bytes, so that a millisecond of noise does not matter


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A link to the next stage: latency one way in seconds, bytes per second towards it (``down``) and back (``up``).

    A bandwidth too high to measure is infinite.

    Raises:
        ValueError: no link can have these values.
    """

    latency_p50: float
    latency_p99: float
    down: float
    up: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_p50 <= self.latency_p99 < math.inf:
            raise ValueError(
                f"no link has latencies of {self.latency_p50} s and, in the 99th of 100, {self.latency_p99}"
            )
        if not (self.down > 0 and self.up > 0):
            raise ValueError(f"no link carries {self.down} bytes a second down and {self.up} up")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds until ``num_bytes`` have arrived at the next stage.

        >>> LinkMeasurement(0.001, 0.002, down=1e6, up=math.inf).seconds(500_000)
        0.501
        """
        return self.latency_p50 + num_bytes / self.down


def probe(ask: Callable[[int, int], float]) -> LinkMeasurement:
    """Measure a link. ``ask(there, back)`` sends ``there`` bytes, receives ``back`` bytes and returns the seconds."""
    small_one = partial(ask, _SMALL_BYTES, _SMALL_BYTES)
    small_one()  # wakes threads and fills caches; not counted
    small = _repeat(small_one, _NUM_SMALL, _SMALL_SECONDS)
    usual = statistics.median(small)
    down, up = _grow(lambda size: ask(size, _SMALL_BYTES), usual), _grow(lambda size: ask(_SMALL_BYTES, size), usual)
    return figures(small, down, up)


def _repeat(ask: Callable[[], float], at_most: int, seconds: float) -> list[float]:
    """Repeat an exchange up to ``at_most`` times, or until ``seconds`` have passed in all. Return the seconds of
    each."""
    times: list[float] = []
    while len(times) < at_most and sum(times) < seconds:
        times.append(ask())
    return times


def _grow(ask: Callable[[int], float], small: float) -> tuple[int, list[float]]:
    """Find the first size that takes clearly longer than a small exchange. Return it and the seconds of its
    exchanges."""
    size = _LEAST_BYTES
    while True:
        times = _repeat(partial(ask, size), 2, _HICCUP)
        if size >= MOST_BYTES or min(times) - small > _LONG_ENOUGH:
            left = _LARGE_SECONDS - sum(times)
            return size, times + _repeat(partial(ask, size), _NUM_LARGE - len(times), left)
        size = min(size * _GROWTH, MOST_BYTES)


def figures(
    small: Sequence[float], down: tuple[int, Sequence[float]], up: tuple[int, Sequence[float]]
) -> LinkMeasurement:
    """Return the measurement. ``small``: seconds of small exchanges; ``down``, ``up``: bytes and seconds of large ones.

    >>> figures([0.002, 0.002, 0.004], (1_000_000, [0.102]), (1_000_000, [0.001]))
    LinkMeasurement(latency_p50=0.001, latency_p99=0.002, down=10000000.0, up=inf)
    """
    usual = statistics.median(small)
    slow = sorted(small)[math.ceil(0.99 * len(small)) - 1]
    return LinkMeasurement(usual / 2, slow / 2, _bandwidth(*down, less=usual), _bandwidth(*up, less=usual))


def _bandwidth(num_bytes: int, seconds: Sequence[float], *, less: float) -> float:
    own = statistics.median_low(seconds) - less  # of two, the shorter one
    return num_bytes / own if own > 0 else math.inf
