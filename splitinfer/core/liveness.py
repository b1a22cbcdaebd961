"""When a stage counts as lost, and how long to wait for it: clocks come in as arguments.

A dead process or a broken link is noticed by the transport. What it cannot notice is an engine that
stands still while its heartbeats go on: that is a step which takes far longer than steps do.
"""

from dataclasses import dataclass

_PATIENCE = 20  # times the usual step
_AT_LEAST = 10.0  # seconds; a machine may be busy with something else for a moment
_BEFORE_ANY = 120.0  # seconds for the first step, which also fills caches and compiles kernels
_SMOOTHING = 0.2  # weight of the newest step


@dataclass(slots=True)
class StallDetector:
    """Tells a step that takes too long. Times in seconds on any one clock."""

    usual: float | None = None  # a step's usual time from out to back
    _since: float | None = None  # when the oldest step under way began to be waited for

    def waiting(self, now: float) -> None:
        """A step is under way."""
        self._since = now if self._since is None else self._since

    def answered(self, now: float, *, more: bool) -> None:
        """A result came; ``more``: other steps are still under way."""
        if self._since is not None:
            took = now - self._since
            self.usual = took if self.usual is None else (1 - _SMOOTHING) * self.usual + _SMOOTHING * took
        self._since = now if more else None

    def reset(self) -> None:
        """Nothing is under way any more."""
        self._since = None

    @property
    def limit(self) -> float:
        """Seconds after which a step counts as stuck."""
        return _BEFORE_ANY if self.usual is None else max(_AT_LEAST, _PATIENCE * self.usual)

    def is_stuck(self, now: float) -> bool:
        """Whether the oldest step has been under way for too long."""
        return self._since is not None and now - self._since > self.limit


_SURE = 0.7  # share of a step's usual time in which it is surely not done


@dataclass(slots=True)
class Pace:
    """How long a loop may look for more work before it waits for the step under way.

    Waiting for a device is deaf: what arrives meanwhile could have been launched behind the step, so that the
    device goes from one to the next. Most of a step's usual time is therefore spent listening. Seconds.
    """

    usual: float = 0.0

    def took(self, seconds: float) -> None:
        """A step is done, so long after it was launched."""
        self.usual += _SMOOTHING * (seconds - self.usual)

    def spare(self, since_launch: float) -> float:
        """Seconds that are left to listen."""
        return max(0.0, _SURE * self.usual - since_launch)


MAX_LOSSES_IN_A_ROW = 3


@dataclass(slots=True)
class LossCounter:
    """Counts losses without a token in between: something that fails again and again is not waited for."""

    in_a_row: int = 0
    _tokens: int = -1

    def another(self, num_tokens: int) -> bool:
        """One more loss, after ``num_tokens`` tokens in all; whether going on makes sense."""
        self.in_a_row = self.in_a_row + 1 if num_tokens == self._tokens else 1
        self._tokens = num_tokens
        return self.in_a_row <= MAX_LOSSES_IN_A_ROW


@dataclass(slots=True)
class RejoinDeadline:
    """How long requests wait for a lost stage. While no request waits, neither does the clock."""

    timeout: float
    _since: float | None = None

    def is_over(self, now: float, *, anybody_waits: bool) -> bool:
        """Whether somebody has waited for ``timeout`` seconds."""
        if not anybody_waits:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self.timeout
