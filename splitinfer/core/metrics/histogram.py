"""Quantiles of many durations in little memory, from counts in some hundred buckets.

A bucket is ``_RATIO`` times as wide as the one before it, so a quantile is right within half a bucket (1.2 %)
from a microsecond to an hour, however many durations there were.
"""

import math

_LOWEST = 1e-6  # seconds; shorter durations count as this
_RATIO = 1.025
_NUM_BUCKETS = 900
_LOG = math.log(_RATIO)
_HIGHEST = _LOWEST * _RATIO**_NUM_BUCKETS


class LogHistogram:
    """A histogram of durations in seconds; ``count``, ``total`` and ``longest`` are exact."""

    __slots__ = ("_buckets", "count", "longest", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = int(math.log(min(seconds, _HIGHEST) / _LOWEST) / _LOG) if seconds > _LOWEST else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations do not exceed; 0 if there are none.

        >>> waits = LogHistogram()
        >>> for milliseconds in range(1, 101): waits.add(milliseconds / 1000)
        >>> round(waits.quantile(0.5), 3), waits.quantile(1.0)
        (0.05, 0.1)
        """
        if share >= 1:
            return self.longest
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(_LOWEST * math.exp(_LOG * (bucket + 0.5)), self.longest)
        return 0.0

    def as_dict(self, *shares: int) -> dict[str, float]:
        """The count, the percentiles ``shares`` and the longest, as plain numbers in seconds.

        >>> LogHistogram().as_dict(50)
        {'count': 0, 'p50': 0.0, 'max': 0.0}
        """
        percentiles = {f"p{share}": self.quantile(share / 100) for share in shares}
        return {"count": self.count, **percentiles, "max": self.longest}
