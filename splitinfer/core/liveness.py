"""When a stage counts as lost, and how long to wait for it. Times are arguments; nothing here reads a clock.

The transport detects a dead process or a broken link. It cannot detect an engine that hangs while its heartbeats
go on; that shows as a step which takes far longer than usual.
"""

from dataclasses import dataclass

_PATIENCE = 20  # times the usual time of a step
_AT_LEAST = 10.0  # seconds; a machine may be busy with something else for some time
_BEFORE_ANY = 120.0  # seconds for the first step, which also fills caches and compiles kernels
_SMOOTHING = 0.2  # weight of the newest step


@dataclass(slots=True)
class StallDetector:
    """Detects a step that takes too long. Times are seconds on any one clock."""

    usual: float | None = None  # usual seconds from sending a step to its result
    _since: float | None = None  # since when the oldest step under way is waited for

    def waiting(self, now: float) -> None:
        """Note that a step is under way."""
        self._since = now if self._since is None else self._since

    def answered(self, now: float, *, more: bool) -> None:
        """Note that a result came; ``more``: other steps are still under way."""
        if self._since is not None:
            took = now - self._since
            self.usual = took if self.usual is None else (1 - _SMOOTHING) * self.usual + _SMOOTHING * took
        self._since = now if more else None

    def reset(self) -> None:
        """Note that nothing is under way any more."""
        self._since = None

    @property
    def limit(self) -> float:
        """Seconds after which a step counts as stuck."""
        return _BEFORE_ANY if self.usual is None else max(_AT_LEAST, _PATIENCE * self.usual)

    def is_stuck(self, now: float) -> bool:
        """Whether the oldest step has been under way for too long."""
        return self._since is not None and now - self._since > self.limit


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
