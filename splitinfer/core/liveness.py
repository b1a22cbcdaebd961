"""When a stage counts as lost, and how long to wait for it. Times are arguments; nothing here reads a clock.

The transport detects a dead process or a broken link. It cannot detect an engine that hangs while its heartbeats go on;
that shows as a step that takes far longer than the cost model predicts.

Stages compute steps in order. So after a result, the next one is due at the latest when its step would be done if all
stages started it only then.
"""

from dataclasses import dataclass

_BEYOND = 20.0  # seconds beyond the prediction; a process that is silent for less than its link's limit is not lost
_UNKNOWN = 120.0  # seconds without a prediction: caches are filled, kernels compiled, or the step is a large one


def limit_of(predicted: float | None) -> float:
    """Return the seconds after which a step counts as stuck. ``predicted``: the seconds it should take; ``None``:
    unknown."""
    return _UNKNOWN if predicted is None else predicted + _BEYOND


MAX_LOSSES_IN_A_ROW = 3


@dataclass(slots=True)
class LossCounter:
    """Counts losses without a token in between, so that a pipeline that fails again and again is given up."""

    in_a_row: int = 0
    _tokens: int = -1

    def another(self, num_tokens: int) -> bool:
        """Count one more loss, after ``num_tokens`` tokens in all. Return whether to recover from it."""
        self.in_a_row = self.in_a_row + 1 if num_tokens == self._tokens else 1
        self._tokens = num_tokens
        return self.in_a_row <= MAX_LOSSES_IN_A_ROW


@dataclass(slots=True)
class RejoinDeadline:
    """The deadline for a lost stage to come back. Its clock runs only while a request waits. ``timeout``: seconds;
    ``since``: when requests began to wait, ``None`` if no request waits."""

    timeout: float
    since: float | None

    def is_over(self, now: float, *, anybody_waits: bool) -> bool:
        """Return whether requests have waited for ``timeout`` seconds."""
        if not anybody_waits:
            self.since = None
            return False
        self.since = now if self.since is None else self.since
        return self.left(now) <= 0

    def left(self, now: float) -> float:
        """Return the seconds until it is over, if requests keep waiting."""
        return self.timeout if self.since is None else self.since + self.timeout - now
