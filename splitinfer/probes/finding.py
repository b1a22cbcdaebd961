"""A finding: what a probe looked at, what came of it, and in a sentence why. Pure.

The exit code is the most serious fault among the findings that failed: what makes answers wrong, then what makes them
impossible, then what makes them slow.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class Outcome(StrEnum):
    """What came of a look, the worst first."""

    FAILED = "failed"  # it does not work
    WARNING = "warning"  # it is slow, or will stop
    NOT_RUN = "not run"  # there was no time left for it
    UNKNOWN = "unknown"  # it could not be looked at
    NOTE = "note"  # good to know
    NOT_AVAILABLE = "not available"  # this machine does not have it
    PASSED = "passed"


class Blame(IntEnum):
    """What a failed finding is about; its value is the exit code. The smallest is the most serious."""

    NONE = 0
    TOKENS = 10  # other tokens than plain mlx-lm's
    TRANSPORT = 11  # a link between processes of this machine
    DEVICE = 12  # the device, or a branch that it should have taken
    MEMORY = 13  # memory, or KV that was to be kept
    WORKER = 14  # the worker at --worker, or the network to it
    SPEED = 15  # a slow link
    TIME = 16  # not everything could be tried


SEND = "send in the file that it writes"
STOP = f"do not trust answers on this machine yet; {SEND}"


Judged = tuple[Outcome, str, str]  # with a sentence and a remedy: a finding without its name


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    name, group: of its subject, and of the subject's feature.
    sentence, remedy: for the page only, as they may name hosts and paths. A remedy is mostly a command to paste.
    numbers: measured values, as plain data.
    error: the type of the exception, if there was one; ``signal``: the one that ended the process; ``at``: the module
        and line of this project where it happened.
    """

    name: str
    outcome: Outcome
    sentence: str
    remedy: str = ""
    group: str = ""
    fault: Blame = Blame.NONE
    numbers: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    signal: str = ""
    at: str = ""


def passed(name: str, sentence: str, numbers: Mapping[str, Any] | None = None) -> Finding:
    return Finding(name, Outcome.PASSED, sentence, numbers=numbers or {})


def failed(name: str, fault: Blame, sentence: str, remedy: str, numbers: Mapping[str, Any] | None = None) -> Finding:
    return Finding(name, Outcome.FAILED, sentence, remedy, fault=fault, numbers=numbers or {})


def from_data(data: Mapping[str, Any]) -> Finding:
    """Return a finding from what ``asdict`` and JSON made of it."""
    return Finding(**{**data, "outcome": Outcome(data["outcome"]), "fault": Blame(data["fault"])})


def exit_code(found: Iterable[Finding]) -> int:
    """Return the most serious fault; 0 if there is none.

    >>> exit_code([failed("", Blame.SPEED, "", ""), failed("", Blame.DEVICE, "", "")])
    12
    """
    return min((int(each.fault) for each in found if each.fault), default=0)
