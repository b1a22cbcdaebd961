"""One client's connection: uvicorn's protocol for HTTP, with bounds on what it waits for (`patience` decides).

uvicorn bounds only the time between two requests. Here every other wait is bounded, too; what is no request is answered
as an error in JSON; a client that does not take its answer loses its connection, where uvicorn would wait for it for
ever; and the end of a client is noticed also when it has sent more than its request.

A client whose machine is gone sends no end. The system asks for it after ``_SILENT_SECONDS`` without a word, and gives
a connection up when what was sent is not acknowledged for ``_UNACKNOWLEDGED_SECONDS``: by itself it would take a
quarter of an hour (Linux, tcp(7): tcp_retries2). Linux has TCP_USER_TIMEOUT for that (tcp(7), in milliseconds), macOS
TCP_RXT_CONNDROPTIME (0x80 in Apple's netinet/tcp.h, in seconds; *assumed* to work as its comment there says).
"""

import asyncio
import json
import logging
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from splitinfer.server.patience import Limits, Phase, Room, Stillness, Verdict, overdue
from splitinfer.server.problem import Problem

log = logging.getLogger(__name__)
_uvicorns_own = logging.getLogger(f"{__name__}.uvicorn")
_uvicorns_own.setLevel(logging.CRITICAL)  # it warns of each request that is none, which anybody can send by thousands

_READ_AHEAD = 64 << 10  # bytes behind a request that are read while it is carried out, so that its client's end is seen
_SILENT_SECONDS, _PROBE_SECONDS, _NUM_PROBES = 30, 10, 3
_UNACKNOWLEDGED_SECONDS = 60
_TCP_RXT_CONNDROPTIME = 0x80
_TOO_MANY_AGAIN = 2.0  # seconds, for a client that is turned away


class Doors:
    """The connections of one server, which look after each other's room. All on the event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.room = Room["Connection"](limits)
        self._open: set[Connection] = set()
        self._leaving: set[Connection] = set()  # made room, and still have something to send
        self._looking: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn makes a connection with."""
        return cast("type[asyncio.Protocol]", partial(Connection, self))

    def arrived(self, connection: "Connection") -> None:
        """A connection is open; it, or another, may have to go."""
        self._open.add(connection)
        victim = self.room.arrived(connection, self.num_open)
        if victim is not connection:
            self.room.waits(connection)
        if victim is not None:
            self._send_away(victim, at_once=victim is connection)
        if self._looking is None:
            self._look_later(connection.loop)

    def left(self, connection: "Connection") -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._leaving.discard(connection)
        self.room.works(connection)

    def _send_away(self, victim: "Connection", *, at_once: bool) -> None:
        """End a connection that has to go. What was written to it still leaves, for as long as that is looked at."""
        self.left(victim)
        if at_once or len(self._leaving) >= self.limits.spare:
            victim.transport.abort()
        else:
            self._leaving.add(victim)
            victim.transport.close()

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = loop.call_later(self.limits.every, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at all connections, again and again while there are any."""
        self._looking, now = None, loop.time()
        for connection in (*self._open, *self._leaving):
            connection.look(now)
        if self._open or self._leaving:
            self._look_later(loop)


class Connection(H11Protocol):
    """A connection of a server whose ``doors`` it came through."""

    def __init__(self, doors: Doors, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._doors, self._still = doors, Stillness(self.loop.time())
        self._is_extra = False  # whether all others were in use when it came
        self._served: ASGIApp = self.app
        self.app = self._carry_out
        self.logger = _uvicorns_own

    # -- what the transport calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is open."""
        super().connection_made(transport)
        if (made := transport.get_extra_info("socket")) is not None:
            _find_out_who_is_gone(made)
        self._doors.arrived(self)
        self._is_extra = self._doors.num_open > self._doors.limits.most

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._doors.left(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take in what has come."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._doors.room.works(self)
        if self.flow.read_paused and self._is_answering and self._has_little_ahead:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The answer is whole; the next request may be there already."""
        self._doors.room.waits(self)
        super().on_response_complete()

    @property
    def _has_little_ahead(self) -> bool:
        """Whether little has come behind the request. Reading stops there, and with it the notice of an end."""
        is_whole = self.conn.their_state is not h11.SEND_BODY
        return is_whole and len(self.conn.trailing_data[0]) < _READ_AHEAD

    # -- how long it takes ---------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _phase(self) -> Phase:
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.transport.is_closing() or self.flow.write_paused or not self._is_answering):
            return Phase.UNSENT
        if self._is_answering:
            return Phase.ANSWER
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.REST
        return Phase.IDLE if self.cycle is not None and not self.conn.trailing_data[0] else Phase.HEAD

    def look(self, now: float) -> None:
        """End it if it takes too long. ``now``: the event loop's time."""
        phase = self._phase
        left = self.transport.get_write_buffer_size() if phase is Phase.UNSENT else 0
        seconds, has_begun = self._still.look(phase, left, now), bool(self.conn.trailing_data[0])
        match overdue(phase, seconds, self._doors.limits, has_begun=has_begun):
            case Verdict.TELL:
                self._refuse(Problem(408, f"the request did not come within {self._doors.limits.head:g} s"))
            case Verdict.CLOSE:
                self.transport.close()
            case Verdict.ABORT:
                self.transport.abort()

    # -- requests ------------------------------------------------------------------------------

    async def _carry_out(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request. What ends in the middle of its answer takes the connection with it at once: closing it
        would wait until the client has taken what was written."""
        cycle = self.cycle
        if self._is_extra and self._doors.room.is_over(self._doors.num_open):
            scope["state"]["turned_away"], send = too_many(self._doors.limits.most), _as_the_last(send)
        try:
            await self._served(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and its requests with it
            log.debug("a request was ended with the server")
        except Exception as error:  # noqa: BLE001 - uvicorn would log its text, which could quote a prompt
            log.error(
                "a request failed: %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
            )
        finally:
            if not cycle.response_complete:
                cycle.disconnected = True  # for uvicorn, which would tell the log
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; uvicorn calls it while it handles h11's error."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        status = status if status < 500 else 400  # h11: 501 for a coding that is unknown, or there twice
        self._refuse(Problem(status, f"this is no request of HTTP/1.1: {error or msg}"))

    def _refuse(self, problem: Problem) -> None:
        """Answer in the middle of a request, if nothing was answered yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever carries it out has nobody to answer any more
            self.cycle.message_event.set()
        with suppress(h11.LocalProtocolError):  # an answer has begun
            self.transport.write(_answer(self.conn, problem))
        self.transport.close()


def _as_the_last(send: Send) -> Send:
    """Sends an answer that is said to be the last on its connection."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return sending


def too_many(most: int) -> Problem:
    """For a connection that comes when all others are in use."""
    return Problem(
        503, f"{most:,} connections are open, and no more may be (--max-connections)", retry_after=_TOO_MANY_AGAIN
    )


def _answer(conn: h11.Connection, problem: Problem) -> bytes:
    """A refusal as bytes, which ends the connection. Which API was asked is not known yet: it has OpenAI's form.

    Raises:
        h11.LocalProtocolError: an answer has begun.
    """
    body = json.dumps(problem.openai()).encode()
    headers = {
        "Content-Type": "application/json", "Content-Length": f"{len(body)}", "Connection": "close", **problem.headers,
    }  # fmt: skip
    events: list[h11.Event] = [
        h11.Response(
            status_code=problem.status, headers=list(headers.items()), reason=STATUS_PHRASES.get(problem.status, b"")
        ),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ]
    return b"".join(conn.send(event) or b"" for event in events)


def _find_out_who_is_gone(made: socket.socket) -> None:
    """Have the system find out that the other end's machine is gone."""
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)  # Linux's name, and macOS's
    options: list[tuple[int, int | None, int]] = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, idle, _SILENT_SECONDS),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None), _PROBE_SECONDS),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None), _NUM_PROBES),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None), 1000 * _UNACKNOWLEDGED_SECONDS),
    ]
    if sys.platform == "darwin":
        options.append((socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, _UNACKNOWLEDGED_SECONDS))
    for level, option, value in options:
        if option is not None:
            with suppress(OSError):  # it is no TCP connection, or the option is unknown here
                made.setsockopt(level, option, value)
