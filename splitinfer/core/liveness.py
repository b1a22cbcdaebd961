"""When a stage counts as lost, and how long to wait for it. Times are arguments; nothing here reads a clock.

The transport detects a dead process or a broken link. It cannot detect an engine that hangs while its heartbeats
go on; that shows as a step which takes far longer than the cost model predicts.

Stages compute steps in order. So a result is due, at the latest, as many seconds after the result before it as its step
takes on all stages when nothing else is under way.
"""

from collections import deque
from dataclasses import dataclass, field

_BEYOND = 10.0  # seconds beyond what is predicted; a machine may be busy with something else for some time
_UNKNOWN = (
    120.0  # seconds where nothing is predicted: caches are filled and kernels compiled, or the step is a large one
)
_SMOOTHING = 0.2  # weight of the newest step


@dataclass(slots=True)
class StallDetector:
    """Detects a step that takes too long. Times are seconds on any one clock."""

    _limits: deque[float] = field(default_factory=deque)  # of the steps under way, oldest first
    _since: float = 0.0  # since when the oldest one is waited for

    def sent(self, now: float, predicted: float | None) -> None:
        """Note that a step is under way. ``predicted``: the seconds that it takes on all stages and links, ``None`` if
        that is not known."""
        if not self._limits:
            self._since = now
        self._limits.append(_UNKNOWN if predicted is None else predicted + _BEYOND)

    def answered(self, now: float) -> None:
        """Note that the result of the oldest step came."""
        if self._limits:
            self._limits.popleft()
        self._since = now

    def reset(self) -> None:
        """Note that nothing is under way any more."""
        self._limits.clear()

    @property
    def limit(self) -> float:
        """Seconds after which the oldest step counts as stuck."""
        return self._limits[0] if self._limits else _UNKNOWN

    def is_stuck(self, now: float) -> bool:
        """Whether the oldest step has been under way for too long."""
        return bool(self._limits) and now - self._since > self.limit


MAX_LOSSES_IN_A_ROW = 3


@dataclass(slots=True)
class LossCounter:
    """Counts losses without a token in between, so that a pipeline which fails again and again is given up."""

    in_a_row: int = 0
    _tokens: int = -1

    def another(self, num_tokens: int) -> bool:
        """Count one more loss, after ``num_tokens`` tokens in all; returns whether to recover from it."""
        self.in_a_row = self.in_a_row + 1 if num_tokens == self._tokens else 1
        self._tokens = num_tokens
        return self.in_a_row <= MAX_LOSSES_IN_A_ROW


@dataclass(slots=True)
class RejoinDeadline:
    """The deadline for a lost stage to come back. Its clock runs only while a request waits."""

    timeout: float
    _since: float | None = None

    def is_over(self, now: float, *, anybody_waits: bool) -> bool:
        """Whether requests have waited for ``timeout`` seconds."""
        if not anybody_waits:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self.timeout
