"""Seconds of a step by its number of rows, for steps of many sequences, as they were measured.

Sizes up to ``EXACT`` rows are kept by themselves, because kernels change there; larger ones in bins, each with the mean
of its rows and of its seconds. Between them times are interpolated; they never fall with more rows (isotonic
regression by pooling adjacent violators: Barlow et al., Statistical Inference under Order Restrictions, 1972), so one
bad measurement does not hide what lies behind it. Beyond the largest size the last slope goes on.

Machines drift, all sizes together: a common factor follows fast, and the ratios between sizes slowly.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

EXACT = 16
_BINS = (*range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))  # their last rows
MOST = _BINS[-1]
_DRIFT, _LEAST_WEIGHT = 0.25, 0.05  # of one measurement, in the common factor and in its own size
_MOST_OFF = 2.0  # times the prediction: larger ratios, and smaller than the inverse, are outliers and clipped
_TRUSTED = 2  # times the largest size: what may be tried


@dataclass(slots=True)
class _Size:
    rows: float
    seconds: float
    count: int = 1


@dataclass(slots=True)
class StepTimes:
    """One stage's seconds by rows. ``took`` learns."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _factor: float = 1.0
    _points: list[tuple[float, float]] | None = None

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def trusted_rows(self) -> int:
        """The most rows that may be tried: twice as many as were measured."""
        largest: float = max((size.rows for size in self._sizes.values()), default=0)
        return min(int(MOST), _TRUSTED * round(largest))

    @property
    def num_sizes(self) -> int:
        """How many sizes were measured."""
        return len(self._sizes)

    def took(self, rows: int, seconds: float) -> None:
        """Learn from one step; more than ``MOST`` rows teach nothing."""
        if not 0 < rows <= MOST or seconds <= 0:
            return
        key = rows if rows <= EXACT else _BINS[bisect_left(_BINS, rows)]
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = _Size(rows, seconds / self._factor)
        else:
            off = seconds / self.at(rows)
            if known.count > 1:
                off = min(max(off, 1 / _MOST_OFF), _MOST_OFF)
            known.count += 1
            weight = max(_LEAST_WEIGHT, 1 / known.count)
            known.rows += weight * (rows - known.rows)
            known.seconds *= off**weight
            self._factor *= off**_DRIFT
        self._points = None

    def at(self, rows: int) -> float:
        """Seconds of a step of so many rows; 0 before the first one."""
        points = self._curve()
        if not points:
            return 0.0
        i = bisect_left(points, (rows, 0.0))
        if i == 0:
            first, seconds = points[0]
            return self._factor * seconds * (1 + rows / first) / 2  # between as long and in proportion
        if i == len(points):
            return self._factor * (points[-1][1] + _last_slope(points) * (rows - points[-1][0]))
        (left, low), (right, high) = points[i - 1], points[i]
        return self._factor * (low + (high - low) * (rows - left) / (right - left))

    def table(self, most: int, like: Callable[[int], float] = lambda _rows: 0.0) -> tuple[float, ...]:
        """Seconds for 0 (none) to ``most`` rows. ``like``: what else is known of seconds by rows, from steps with
        prompts: beyond the largest size times rise as those do, if that is more."""
        last = round(max((size.rows for size in self._sizes.values()), default=0))
        known = [self.at(rows) for rows in range(1, most + 1)]
        floor, base = self.at(last), like(last)
        further = [max(at, floor + like(rows) - base) if rows > last else at for rows, at in enumerate(known, 1)]
        return (0.0, *further)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds for each size that was measured."""
        return {round(rows): self._factor * seconds for rows, seconds in self._curve()}

    def _curve(self) -> list[tuple[float, float]]:
        if self._points is None:
            self._points = _isotonic(sorted(self._sizes.values(), key=lambda size: size.rows))
        return self._points


def _isotonic(sizes: list[_Size]) -> list[tuple[float, float]]:
    """Rows and seconds, with the least change by which the seconds never fall."""
    pools: list[tuple[float, int, list[float]]] = []  # mean seconds, weight, rows
    for size in sizes:
        pool = (size.seconds, min(size.count, 8), [size.rows])
        while pools and pools[-1][0] > pool[0]:
            seconds, weight, rows = pools.pop()
            both = weight + pool[1]
            pool = ((seconds * weight + pool[0] * pool[1]) / both, both, [*rows, *pool[2]])
        pools.append(pool)
    return [(rows, seconds) for seconds, _, each in pools for rows in each]


def _last_slope(points: list[tuple[float, float]]) -> float:
    """Seconds for each further row: the slope of the upper half of what was measured."""
    last, seconds = points[-1]
    before = [(rows, at) for rows, at in points[:-1] if rows <= last / 2] or points[:1]
    rows, at = before[-1]
    return (seconds - at) / (last - rows) if last > rows else 0.0
