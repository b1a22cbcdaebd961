"""How often values lay between given bounds, since the start: what a histogram of Prometheus is made of.

``core.metrics.histogram`` answers for quantiles of a window by itself; this one is read by a program that subtracts
what it has read before, and needs the bounds that its questions were written for. Counts never go back.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Histogram:
    """A reading. ``counts[i]``: values over ``bounds[i - 1]`` and up to ``bounds[i]``; the last: over all bounds.
    ``total``: the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Values up to each bound; the last: all.

        >>> Histogram((1, 2), (3, 0, 4)).cumulative
        (3, 3, 7)
        """
        return tuple(accumulate(self.counts))

    def up_to(self, most: float) -> "Histogram":
        """The same with the bounds up to ``most`` only.

        >>> Histogram((1, 2, 5), (3, 0, 4, 1), 40.0).up_to(2)
        Histogram(bounds=(1, 2), counts=(3, 0, 5), total=40.0)
        """
        kept = sum(bound <= most for bound in self.bounds)
        return Histogram(self.bounds[:kept], (*self.counts[:kept], sum(self.counts[kept:])), self.total)


class Distribution:
    """Counts values by ``bounds``, which rise."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value; one that equals a bound is up to it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Histogram:
        """What was counted so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)
