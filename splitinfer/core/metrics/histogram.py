"""Counts how many values lay between given bounds, since the start. Counts only grow: a program that reads them
repeatedly subtracts its last reading.

``SECONDS`` has bounds fine enough for quantiles: each is at most 2.5 % above the one before. It contains the bounds
that vLLM's dashboards use.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))
SECONDS = tuple(sorted({*FIRST_TOKEN, *BETWEEN_TOKENS, *(1e-6 * 1.025**n for n in range(900))}))


class Histogram:
    """Counts values by rising ``bounds``. ``total`` and ``longest`` are exact."""

    __slots__ = ("_counts", "bounds", "longest", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = self.longest = 0.0

    def add(self, value: float) -> None:
        """Count one value. A value equal to a bound counts as up to it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if value > self.longest:
            self.longest = value

    def copy(self) -> "Histogram":
        """Return a copy that later values do not change."""
        made = Histogram(self.bounds)
        made._counts, made.total, made.longest = self._counts.copy(), self.total, self.longest
        return made

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def up_to(self, bounds: Sequence[float]) -> list[int]:
        """Return how many values were up to each of ``bounds``, which must be among its own.

        >>> values = Histogram((1, 2, 5))
        >>> for value in (1, 2, 3, 9): values.add(value)
        >>> values.up_to((1, 5)), values.count
        ([1, 3], 4)
        """
        sums = list(accumulate(self._counts))
        return [sums[bisect_left(self.bounds, bound)] for bound in bounds]

    def quantile(self, share: float) -> float:
        """Return the bound that ``share`` of the values do not exceed, but at most the longest value; 0 without values.

        >>> waits = Histogram()
        >>> for milliseconds in range(1, 101): waits.add(milliseconds / 1000)
        >>> round(waits.quantile(0.5), 3), waits.quantile(1.0)
        (0.05, 0.1)
        """
        rank = max(1, math.ceil(share * self.count))
        sums = list(accumulate(self._counts))
        place = bisect_left(sums, rank)
        return min(self.bounds[place], self.longest) if place < len(self.bounds) else self.longest

    def as_dict(self, *shares: int) -> dict[str, float]:
        """Return the count, the percentiles ``shares`` and the longest, as plain numbers.

        >>> Histogram().as_dict(50)
        {'count': 0, 'p50': 0.0, 'max': 0.0}
        """
        percentiles = {f"p{share}": self.quantile(share / 100) for share in shares}
        return {"count": self.count, **percentiles, "max": self.longest}
