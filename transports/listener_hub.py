"""The listening side's hub: it accepts many connections on one port and turns some of them into links.

A connection is only a descriptor until its first message. A valid OPEN makes it a link; after any other message, or
after OPEN_SECONDS without one, it is shut, with at most one line per minute in the log. The number of connections
without a link bounds the memory that they take.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from transports.acknowledged import duplicate
from transports.address import HostPort
from transports.base import FLUSH_SECONDS, FrameError, LinkOptions
from transports.framing import FrameKind, decode, encode
from transports.hub import Hub, TcpLink, source_of
from transports.security import key_of

log = logging.getLogger("transports")

OPEN_SECONDS = 5.0  # also zmq's own limit for its handshake (HANDSHAKE_IVL)
NOTE_EVERY = 60.0  # seconds between lines in the log about peers without a link
UNKNOWN = "an unknown peer"

OpeningCheck = Callable[[bytes], object]  # takes the kind of a link that is not plain; raises FrameError to refuse it


def plain_only(_opening: bytes) -> None:
    """Refuse every link that is not plain. Raises FrameError."""
    raise FrameError("this listener accepts only plain links")


@dataclass(slots=True, eq=False)
class _Connection:
    """A TCP connection to the listening port, from accept to disconnect, as the monitor reports it."""

    descriptor: int
    peer: str  # "host:port"
    shut_at: float = math.inf
    link: TcpLink | None = None
    is_refused: bool = False


class ListenerHub(Hub):
    """A ROUTER and the links of all its peers.

    The socket names a peer by a routing id, its monitor by a file descriptor; a received frame has its descriptor
    (SRCFD), which joins the two. So a lost connection ends its link at once, and a connection can be shut.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        options: LinkOptions,
        address: str,
        offer: Callable[[TcpLink], bool],
        check_opening: OpeningCheck,
    ) -> None:
        super().__init__(socket, monitor, options, f"on {address}")
        self.address = address
        self._offer, self._check_opening = offer, check_opening
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._lost: deque[_Connection] = deque()
        self._quiet_until, self._num_untold = -math.inf, 0  # for `_note`

    def stop(self) -> None:
        """End all links and the thread; zmq's own threads free the port a moment later."""
        with self._lock:
            for link in tuple(self._links):
                reason = f"{self.address} stopped listening"
                link.inbox.end(reason, drop=True)
                self._finish(link, reason)
            self._is_stopping = True
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(FLUSH_SECONDS)

    def _on_finished(self, link: TcpLink) -> None:
        connection = self._by_route.get(link.route[0])
        if connection is not None:  # if the peer has not disconnected by then, having read BYE
            connection.shut_at = time.monotonic() + FLUSH_SECONDS

    def _descriptor_of(self, link: TcpLink) -> int:
        connection = self._by_route.get(link.route[0])
        return -1 if connection is None else connection.descriptor

    def _drop(self, link: TcpLink) -> None:
        connection = self._by_route.get(link.route[0])
        if connection is not None:
            _shut_connection(connection)

    def _is_idle(self) -> bool:
        return not self._links and not self._by_descriptor

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        if event == zmq.Event.ACCEPTED:
            shut_at = time.monotonic() + OPEN_SECONDS
            self._by_descriptor[descriptor] = _Connection(descriptor, _name_peer(descriptor), shut_at)
        elif event == zmq.Event.DISCONNECTED:
            connection = self._by_descriptor.pop(descriptor, None)
            if connection is not None:
                self._lost.append(connection)

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        route, body = message[0].bytes, message[1:]
        connection = self._by_route.get(route)
        if connection is None:
            self._open(route, body)
        elif connection.link is not None:
            self._take(connection.link, body, now)

    def _open(self, route: bytes, body: Sequence[zmq.Frame]) -> None:
        """Answer the first message of a peer: open a link, or refuse it."""
        # Descriptors are reused. By now the monitor has reported everything that happened before this message was
        # sent, so after reading it the descriptor means this message's connection, or none.
        self._read_monitor()
        connection = self._by_descriptor.get(source_of(body))
        if connection is None or connection.is_refused or connection.link is not None:
            return
        try:
            packet = decode([part.buffer for part in body], self._options)
            if packet.kind is not FrameKind.OPEN:
                raise FrameError(f"{packet.kind.name} before OPEN")
            if packet.header:
                self._check_opening(packet.header)
        except FrameError as problem:
            self._refuse(connection, route, str(problem))
            return
        link = TcpLink(self, f"tcp://{connection.peer}", (route,), self._options)
        link.opening = packet.header
        link.peer_key = key_of(body[0]) if self._options.security is not None else None
        with self._lock:
            self._try_send(link, encode(FrameKind.ACCEPT, seq=0))
            if link.over.is_set():
                return
            connection.link, connection.shut_at = link, math.inf
            self._by_route[route] = connection
            self._links.add(link)
            self._tend_at = 0.0
        self._offer(link)

    def _refuse(self, connection: _Connection, route: bytes, problem: str) -> None:
        connection.is_refused = True
        connection.shut_at = time.monotonic() + FLUSH_SECONDS  # time for the peer to read the reason
        self._note(connection, f"is not a usable peer: {problem}", logging.WARNING)
        refused = TcpLink(self, f"tcp://{connection.peer}", (route,), self._options)
        with self._lock:
            self._send_bye(refused, f"{self.address} refuses: {problem}")

    def _on_dry(self) -> None:
        while self._lost:
            connection = self._lost.popleft()
            if connection.link is not None:
                self._by_route.pop(connection.link.route[0], None)
                with self._lock:
                    self._finish(connection.link, f"connection to {connection.link.address} lost")
            elif not connection.is_refused:
                self._note(connection, "connected and left without opening a link, as a search does", logging.DEBUG)

    def _on_tick(self, now: float) -> None:
        for connection in self._by_descriptor.values():
            if now >= connection.shut_at:
                connection.shut_at = math.inf
                _shut_connection(connection)

    def _note(self, connection: _Connection, what: str, level: int) -> None:
        now = time.monotonic()
        self._num_untold += now < self._quiet_until
        if now >= self._quiet_until:
            others = f" ({self._num_untold} earlier ones not mentioned)" if self._num_untold else ""
            log.log(level, "%s: %s %s%s", self.address, connection.peer, what, others)
            self._quiet_until, self._num_untold = now + NOTE_EVERY, 0


def _peer_name(connection: sockets.socket) -> str:
    return str(HostPort(*connection.getpeername()[:2]))


def _name_peer(descriptor: int) -> str:
    """Return "host:port" of a connection's far end; UNKNOWN if it is gone already."""
    try:
        with duplicate(descriptor) as connection:
            return _peer_name(connection)
    except OSError:
        return UNKNOWN


def _shut_connection(connection: _Connection) -> None:
    """End a TCP connection that zmq holds; zmq then sees it as lost.

    zmq has no call for this. The descriptor is duplicated first, so that it cannot change meanwhile. Then its peer is
    compared: zmq may have closed the connection, and another one may have got the descriptor.
    """
    with contextlib.suppress(OSError), duplicate(connection.descriptor) as held:
        if _peer_name(held) == connection.peer:
            held.shutdown(sockets.SHUT_RDWR)
