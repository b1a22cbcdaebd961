"""A check: what was looked at, whether it is right, and in a sentence why not. Pure.

The exit code is the most serious fault among the checks that failed: what makes results wrong, then what makes them
impossible, then what makes them slow.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class State(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"  # there was no time left for it


class Fault(IntEnum):
    """What a failed check is about; its value is the exit code. The smallest is the most serious."""

    NONE = 0
    TOKENS = 10  # other tokens than plain mlx-lm's
    TRANSPORT = 11  # a link between processes of this machine
    DEVICE = 12  # the device, or a branch that it should have taken
    MEMORY = 13  # memory, or KV that was to be kept
    WORKER = 14  # the worker at --worker, or the network to it
    SPEED = 15  # a slow link
    TIME = 16  # not everything could be tried


class Reason(StrEnum):
    """Why a check has its state, in a word that may stand in a document."""

    NONE = ""
    WRONG_TOKEN = "wrong token"
    TOO_FEW_TOKENS = "too few tokens"
    ROUNDING = "rounding"
    FAILED = "failed"
    CRASHED = "crashed"
    HUNG = "hung"
    NO_TIME = "no time"
    UNAVAILABLE = "unavailable"
    NOT_TAKEN = "branch not taken"
    OTHER_DEVICE = "branch of another device"
    LARGE_ERROR = "error too large"
    NO_DRAFTS = "no drafts"
    KV_NOT_FOUND = "kept KV not found"
    LEAK = "leak"
    LOW_MEMORY = "low memory"
    NOT_WIRED = "not wired"
    NO_GPU = "no GPU"
    NAME = "name not found"
    NOTHING_LISTENS = "nothing listens"
    NO_ROUTE = "no route"
    TIMEOUT = "timeout"
    NETWORK = "network"
    NOT_ADMITTED = "not admitted"
    VERSIONS = "other versions"
    REFUSED = "refused"
    SLOW = "slow link"


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``sentence`` and ``remedy`` are for the page only: they may name hosts and paths.

    error: the type of the exception, where there was one; signal: the one that ended the process; at: the module and
    line of this project in which it happened.
    """

    group: str
    name: str
    state: State
    sentence: str
    remedy: str = ""
    fault: Fault = Fault.NONE
    reason: Reason = Reason.NONE
    error: str = ""
    signal: str = ""
    at: str = ""


def passed(group: str, name: str, sentence: str, reason: Reason = Reason.NONE) -> Check:
    """A check that passed."""
    return Check(group, name, State.PASSED, sentence, reason=reason)


def not_applicable(group: str, name: str, sentence: str, reason: Reason = Reason.UNAVAILABLE) -> Check:
    """A check that says nothing here."""
    return Check(group, name, State.NOT_APPLICABLE, sentence, reason=reason)


def failed(
    group: str, name: str, fault: Fault, reason: Reason, sentence: str, remedy: str = "", *, at: str = ""
) -> Check:
    """A check that failed."""
    return Check(group, name, State.FAILED, sentence, remedy, fault, reason, at=at)


def exit_code(checks: Iterable[Check]) -> int:
    """The most serious fault; 0 if there is none.

    >>> exit_code([failed("", "", Fault.SPEED, Reason.SLOW, ""), failed("", "", Fault.DEVICE, Reason.FAILED, "")])
    12
    """
    return min((int(check.fault) for check in checks if check.fault), default=0)
