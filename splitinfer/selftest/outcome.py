"""What a part's process reported, and in which way it ended. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitinfer.selftest.checks import Check, Fault, Reason, State

HANGING = 15.0  # seconds without a word, after which a part that overran was hanging and not slow; at least
_STARTS = 10.0  # as many times as long as the first part takes, which does little more than start
_OVERRAN = "overran"
_NO_TIME = ("no time was left", "its time was over")
_SIGNAL = re.compile(r"signal (SIG[A-Z0-9]+)")
_ERROR = re.compile(r"(?:failed: )?([A-Z]\w+)(?::|$)")


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """``found``: findings by name, each a mapping, one with "problem" if that finding failed. ``problem``: why the part
    came to no end; ``trying``: what it was at when it overran, ``silent_s``: seconds since its last word then,
    ``patience_s``: of which so many are those of a part that hangs; ``at``: where it failed."""

    found: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    trying: str | None = None
    at: str = ""
    silent_s: float = 0.0
    patience_s: float = HANGING
    seconds: float = 0.0
    limit_s: float = 0.0

    def finding(self, name: str) -> Mapping[str, Any] | None:
        """What was found under a name, if it was found and did not fail."""
        value = self.found.get(name)
        return value if isinstance(value, Mapping) and "problem" not in value else None

    @property
    def overran(self) -> bool:
        """Whether its process was ended because its share of the time was over."""
        return (self.problem or "").startswith(_OVERRAN)

    @property
    def was_slow(self) -> bool:
        """Whether it was still getting on then, and not hanging."""
        return self.overran and self.silent_s < self.patience_s


def patience(first_seconds: float) -> float:
    """Seconds of silence after which a part hangs, where the first part took so long: on a machine that does much else,
    all take longer.

    >>> patience(0.8), patience(8.0)
    (15.0, 80.0)
    """
    return max(HANGING, _STARTS * first_seconds)


def broken(group: str, outcome: PartOutcome, fault: Fault, remedy: str = "") -> list[Check]:
    """A check for each finding that failed, and one for the part if it came to no end."""
    found = [
        _of_problem(group, name, str(value["problem"]), fault, remedy, str(value.get("at", "")))
        for name, value in outcome.found.items()
        if isinstance(value, Mapping) and "problem" in value
    ]
    if outcome.problem is not None:
        problem = _NO_TIME[1] if outcome.was_slow else outcome.problem
        found.append(_of_problem(group, outcome.trying or "", problem, fault, remedy, outcome.at))
    return found


def _of_problem(group: str, name: str, problem: str, fault: Fault, remedy: str, at: str) -> Check:
    """A check for what went wrong otherwise than by a wrong result."""
    if problem.startswith(_NO_TIME):
        sentence = "not all of it could be tried in the time"
        return Check(group, name, State.NOT_RUN, sentence, _MORE_TIME, Fault.TIME, Reason.NO_TIME)
    if problem.startswith(_OVERRAN):
        sentence = f"it did not come to an end ({problem})"
        return Check(group, name, State.FAILED, sentence, _HUNG, fault, Reason.HUNG)
    if (ended := _SIGNAL.search(problem)) is not None:
        sentence = f"its process was ended by {ended[1]}"
        return Check(group, name, State.FAILED, sentence, _SEND, fault, Reason.CRASHED, signal=ended[1], at=at)
    error = _ERROR.match(problem)
    reason = Reason.FAILED if error else Reason.CRASHED
    return Check(
        group, name, State.FAILED, problem, remedy or _SEND, fault, reason, error=error[1] if error else "", at=at
    )


_MORE_TIME = "run it again when the machine does nothing else, or with more time: --seconds 600"
_HUNG = "run it again; if it hangs again, send the file in (--json FILE)"
_SEND = "send the file in (--json FILE)"
