"""The connections of the server: how many there are, and how long one may be still.

None of uvicorn, hypercorn and granian bounds an answer that its client does not read, or a body. uvicorn writes a token
in one call, shows which connections are open, and calls back once a second: ``Connections.look`` is that call. Whoever
opens a server to the internet puts a reverse proxy in front (docs/use/server-proxy.md).
"""

import contextlib
import math
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from splitinfer.server.problem import Problem

_READ_AHEAD = 64 << 10  # bytes after a request
_MOST_UNREAD = 64 << 10  # bytes of an answer; Linux takes twice as many
_TOO_MANY_AGAIN = 2.0  # seconds, for a client that is turned away


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of connections. ``most``: open at a time. In seconds: ``head``, to send a request's head, or a body
    that nobody reads; ``idle``, between two requests; ``unread``, while a client takes nothing of an answer."""

    most: int = 4096
    head: float = 20.0
    idle: float = 75.0
    unread: float = 60.0


class Connections:
    """The connections of one server. ``open``: uvicorn's set. Without a clock of its own."""

    def __init__(self, limits: Limits) -> None:
        self.open: Collection[Any] = ()
        self._limits = limits
        self._still: dict[Any, tuple[str, int, float]] = {}
        """What each waits for, its bytes to send, and since when; in the loop's seconds."""

    def look(self, now: float) -> None:
        """End connections that were still for too long at ``now`` (seconds), and connections beyond the limit."""
        bounds = {"head": self._limits.head, "unread": self._limits.unread}  # uvicorn ends idle ones
        still = {}
        for connection in self.open:
            what, unsent = _waits_for(connection)
            if connection not in self._still:
                _bound_what_the_system_keeps(connection)
            awaited, more, since = self._still.get(connection, (what, unsent, now))
            if awaited != what or unsent < more:  # it has moved
                since = now
            still[connection] = what, unsent, since
            if now - since >= bounds.get(what, math.inf):
                connection.transport.abort()
            elif what == "answer":
                _listen_for_its_end(connection)
        self._still = still
        # No other bound stops a client that never sends a request. The system would run out of files, and refuse just
        # any connection.
        if (number := len(self.open) - self._limits.most) > 0:
            self._make_room(number)

    def turned_away(self) -> Problem | None:
        """Return why a new request is not taken: all connections are in use. The one that waits longest for a request
        makes room, so strangers who hold connections keep nobody out."""
        if len(self.open) <= self._limits.most or self._make_room(1):
            return None
        sentence = f"{self._limits.most:,} connections are open, and no more may be (--max-connections)"
        return Problem(503, sentence, retry_after=_TOO_MANY_AGAIN, closes=True)

    def _make_room(self, number: int) -> int:
        """End at most ``number`` connections that wait for a request, the longest first. Return how many ended."""
        new = ("head", 0, math.inf)  # since the last look
        waiting = [each for each in self.open if _waits_for(each)[0] in ("head", "idle")]
        oldest = sorted(waiting, key=lambda each: self._still.get(each, new)[2])[:number]
        for connection in oldest:
            connection.transport.abort()
        return len(oldest)


def _waits_for(connection: H11Protocol) -> tuple[str, int]:
    """Return what a connection waits for: "head", "idle", "answer" or "unread"; and the bytes that it has to send."""
    cycle, transport = connection.cycle, connection.transport
    is_answering = cycle is not None and not cycle.response_complete
    unsent = transport.get_write_buffer_size()
    if unsent and (transport.is_closing() or connection.flow.write_paused or not is_answering):
        return "unread", unsent
    if is_answering:
        return "answer", 0
    has_rest = connection.conn.their_state is h11.SEND_BODY or bool(connection.conn.trailing_data[0])
    return "head" if cycle is None or has_rest else "idle", 0


def _bound_what_the_system_keeps(connection: H11Protocol) -> None:
    """Have a client that does not read be noticed: systems keep megabytes for it, a quarter of an hour of an answer."""
    with contextlib.suppress(OSError):
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_UNREAD)


def _listen_for_its_end(connection: H11Protocol) -> None:
    """Read on behind a request, where uvicorn stops: else its client's end is noticed with the next write only."""
    is_whole = connection.conn.their_state is not h11.SEND_BODY
    if connection.flow.read_paused and is_whole and len(connection.conn.trailing_data[0]) < _READ_AHEAD:
        connection.flow.resume_reading()
