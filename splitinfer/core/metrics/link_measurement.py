r"""How quick a link is, found by questions and answers that are timed at one end.

Each crosses the link once there and once back, with bytes on one of the ways or hardly any:

    small     latency + latency                   half of it is the latency, one way
    down      latency + bytes / down + latency    less a small one, it is the time of the bytes
    up        latency + latency + bytes / up

What the ends do for a frame (wake a thread, copy, check a sum) is the link's, too: a step pays the same. How many
questions are asked, and how large, depends on how long the ones before took: about 0.3 s for the whole, less on a quick
link, and more only where the least that tells anything takes longer.
"""

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

MOST_BYTES = 4 * 2**20  # of one way of one exchange
_LEAST_BYTES, _GROWTH = 64 * 2**10, 4
_SMALL_BYTES = 64
_NUM_SMALL, _NUM_LARGE = 20, 5
_SMALL_SECONDS, _LARGE_SECONDS = 0.1, 0.07  # after which no further exchange of that size is begun
_HICCUP = 0.5  # seconds that a busy machine may add to one exchange: what took less is asked again
_LONG_ENOUGH = 0.02  # seconds of bytes that noise of a millisecond does not hide


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A link to the next stage: seconds one way, and bytes a second towards it (``down``) and back (``up``).

    Bandwidth too high to be told is infinite. Raises ValueError for what no link has.
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
        """For so many bytes to arrive at the next stage.

        >>> LinkMeasurement(0.001, 0.002, down=1e6, up=math.inf).seconds(500_000)
        0.501
        """
        return self.latency_p50 + num_bytes / self.down


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer, by the bytes that go there and come back."""

    there: int
    back: int


_SMALL = Exchange(_SMALL_BYTES, _SMALL_BYTES)
Asking = Generator[Exchange, float, list[float]]


def probe() -> Generator[Exchange, float, LinkMeasurement]:
    """Yields what to exchange next, is sent the seconds that it took, and returns the figures."""
    yield _SMALL  # wakes threads and fills caches; not counted
    small = yield from _repeat(_SMALL, _NUM_SMALL, _SMALL_SECONDS)
    usual = statistics.median(small)
    down, seconds_down = yield from _grow(lambda size: Exchange(size, _SMALL_BYTES), usual)
    up, seconds_up = yield from _grow(lambda size: Exchange(_SMALL_BYTES, size), usual)
    return figures(small, (down, seconds_down), (up, seconds_up))


def _repeat(exchange: Exchange, at_most: int, seconds: float) -> Asking:
    """The same some times: at least once, and not again when ``seconds`` are over."""
    times: list[float] = []
    while len(times) < at_most and sum(times) < seconds:
        times.append((yield exchange))
    return times


def _grow(of_size: Callable[[int], Exchange], small: float) -> Generator[Exchange, float, tuple[int, list[float]]]:
    """The first size that takes long enough to be told from a small one, and what it took."""
    size = _LEAST_BYTES
    while True:
        times = yield from _repeat(of_size(size), 2, _HICCUP)
        if size >= MOST_BYTES or min(times) - small > _LONG_ENOUGH:
            times += yield from _more(of_size(size), times)
            return size, times
        size = min(size * _GROWTH, MOST_BYTES)


def _more(exchange: Exchange, times: Sequence[float]) -> Asking:
    left = _LARGE_SECONDS - sum(times)
    return (yield from _repeat(exchange, _NUM_LARGE - len(times), left))


def figures(
    small: Sequence[float], down: tuple[int, Sequence[float]], up: tuple[int, Sequence[float]]
) -> LinkMeasurement:
    """From the seconds of small exchanges, and of those with so many bytes more down and up.

    >>> figures([0.002, 0.002, 0.004], (1_000_000, [0.102]), (1_000_000, [0.001]))
    LinkMeasurement(latency_p50=0.001, latency_p99=0.002, down=10000000.0, up=inf)
    """
    usual = statistics.median(small)
    return LinkMeasurement(
        usual / 2, _percentile(small, 0.99) / 2, _bandwidth(*down, less=usual), _bandwidth(*up, less=usual)
    )


def _bandwidth(num_bytes: int, seconds: Sequence[float], *, less: float) -> float:
    own = statistics.median_low(seconds) - less  # of two, the one without a hiccup
    return num_bytes / own if own > 0 else math.inf


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]
