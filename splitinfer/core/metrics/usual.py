"""What something usually takes: the median of the last measurements.

Hosts and links take a little, and now and then much for reasons of their own (another process, a wake-up that came
late). A mean follows those, and what is decided by it changes with them; the median stays.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_LAST = 15


@dataclass(slots=True)
class Usual:
    """Measurements of one thing, the latest ones.

    >>> usual = Usual()
    >>> usual.seconds
    0.0
    >>> for seconds in (2.0, 2.0, 90.0, 2.2):
    ...     usual.took(seconds)
    >>> usual.seconds
    2.1
    """

    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def took(self, seconds: float) -> None:
        """Learn from one measurement."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """What it usually takes; 0 before the first measurement."""
        return median(self._last) if self._last else 0.0
