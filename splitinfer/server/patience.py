"""How long a connection may take for what, and which one makes room for another. Pure: the caller has the clock.

A connection is always in one of these phases:

    head      nothing, or a part of a request's head, has come; before the first request, or a part of the next
    idle      a request was answered, and nothing of the next one has come
    answer    a request is carried out; `body` bounds how long a client may take to send
    rest      the answer came before the request's body was whole, and the rest is thrown away
    unsent    there is an answer, or a part of it, and the client does not take it; also once the connection is closing

Each phase but `answer` is bounded, so nobody can hold connections for nothing: not with a head that comes a byte at a
time, and not by asking and never reading. When there are as many connections as there may be, one that waits for a
request makes room for the next: the one that has waited longest. Only if all are in use are requests turned away.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Phase(StrEnum):
    """What a connection waits for."""

    HEAD = "head"
    IDLE = "idle"
    ANSWER = "answer"
    REST = "rest"
    UNSENT = "unsent"


class Verdict(StrEnum):
    """What is done with a connection that took too long."""

    TELL = "tell"  # say that the request took too long, and close
    CLOSE = "close"  # what was written still leaves
    ABORT = "abort"  # nobody would take it


@dataclass(frozen=True, slots=True)
class Limits:
    """Of connections. ``most``: at a time; further ones are turned away, and beyond ``spare`` more are not even told.

    The others are seconds: ``head`` for a request's head, and TLS's handshake before it, ``idle`` between two requests,
    ``rest`` for a body that nobody wants, ``unsent`` without the client taking anything, ``every`` between two looks at
    all connections.
    """

    most: int = 4096
    spare: int = 64
    head: float = 20.0
    idle: float = 75.0
    rest: float = 10.0
    unsent: float = 60.0
    every: float = 1.0

    @property
    def most_sockets(self) -> int:
        """Connections that are accepted and not closed: also those to be told why they are turned away, those that made
        room and still have something to send, and, as far as there is room, those in TLS's handshake."""
        return self.most + 2 * self.spare


def overdue(phase: Phase, seconds: float, limits: Limits, *, has_begun: bool = True) -> Verdict | None:
    """What is done with a connection that is in a phase for ``seconds``, without any progress where that counts.

    has_begun: whether something of the head has come; whoever has sent nothing is not told that it took too long.
    """
    bounds = {Phase.HEAD: limits.head, Phase.IDLE: limits.idle, Phase.REST: limits.rest, Phase.UNSENT: limits.unsent}
    if phase is Phase.ANSWER or seconds < bounds[phase]:
        return None
    if phase is Phase.UNSENT:
        return Verdict.ABORT
    return Verdict.TELL if phase is Phase.HEAD and has_begun else Verdict.CLOSE


class Stillness:
    """Since when a phase lasts without progress. ``left``: of what gets less by progress, such as bytes to send."""

    __slots__ = ("_left", "_phase", "since")

    def __init__(self, now: float) -> None:
        self._phase, self._left, self.since = Phase.HEAD, 0, now
        """``since``: in the caller's seconds."""

    def look(self, phase: Phase, left: int, now: float) -> float:
        """Seconds without progress, as of ``now``."""
        if phase is not self._phase or left < self._left:
            self.since = now
        self._phase, self._left = phase, left
        return now - self.since


class Room(Generic[C]):
    """The connections that wait for a request, by how long; who makes room, and who is turned away."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[C, None] = {}  # the longest first

    def waits(self, connection: C) -> None:
        """A connection begins to wait for a request."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def works(self, connection: C) -> None:
        """A connection has a request, or is gone."""
        self._waiting.pop(connection, None)

    def arrived(self, connection: C, num_open: int) -> C | None:
        """A connection has come; the one that has to go, which may be itself. ``num_open``: it included.

        Between ``most`` and ``spare`` more, where all others are in use, it stays, to be told why (``is_over``).
        """
        victim = next(iter(self._waiting), None) if num_open > self._limits.most else None
        if victim is not None:
            self.works(victim)
            return victim
        return connection if num_open > self._limits.most + self._limits.spare else None

    def is_over(self, num_open: int) -> bool:
        """Whether a request of a new connection is turned away."""
        return num_open > self._limits.most
