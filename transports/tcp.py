"""tcp://host:port over ZeroMQ: connecting and listening. `hub` then serves the connections.

A connector is a DEALER, a listener a ROUTER, so that one port serves many peers. The connector sends the first message,
OPEN, and the listener answers ACCEPT or, with a reason, BYE. With `LinkOptions.security` the connection is encrypted,
and a peer whose key is not admitted is refused before that (`security`).

By default zmq reconnects and loses messages on the way; RECONNECT_IVL=-1 forbids it, and every attempt to connect
uses a new socket. Heartbeats are sent by the hub and carry the engine's progress. zmq's own (HEARTBEAT_IVL) stay off:
in libzmq 4.3.5 their timer can abort the process ("Assertion failed: !_io_error") when a connection is lost whose
receive queue is full or closing.
"""

from __future__ import annotations

import errno
import math
import os
import socket as sockets
import threading
import time

import zmq

from transports.address import HostPort, parse_host_port
from transports.base import (
    AddressError,
    AddressInUse,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    LinkTimeout,
)
from transports.framing import INLINE_BYTES, PRELUDE_BYTES, FrameKind, Packet, decode, encode, reason_of
from transports.hub import ConnectorHub, TcpLink, parse_event
from transports.inbox import QueueListener
from transports.listener_hub import OPEN_SECONDS, ListenerHub, OpeningCheck, plain_only
from transports.security import secure_connector, secure_listener
from transports.unreachable import PROBE_SECONDS, Unreachable, probe

_QUEUE_FRAMES = 512
_CURVE_BYTES = 64  # the most that encryption adds to a message
_BACKLOG = 1024
_RETRY_SECONDS = 0.05
_HANG_UPS = 3  # in a row that count as a refusal
_NO_ANSWER = "connected, but no answer"
_ONE_OF_MANY_SECONDS = 1.0  # how long one of several addresses of a host may take before the next is tried

_NO_DETAIL = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_WHY_REFUSED = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not admit this machine's key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "one end of the link is encrypted and the other is not",
    _NO_DETAIL: "it does not have the expected key, or ended the handshake",
}
_HANDSHAKE_FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | _NO_DETAIL

_contexts_lock = threading.Lock()
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


class _AttemptFailedError(Exception):
    """This attempt to connect failed; another may succeed.

    ``hung_up``: the peer hung up in the handshake. An encrypted listener does so to a plain link, often before it says
    that it is encrypted; a process that dies does so once.
    """

    def __init__(self, text: str, *, hung_up: bool = False) -> None:
        super().__init__(text)
        self.hung_up = hung_up


class _UnresolvedError(AddressError):
    """A name without an address. ``number``: getaddrinfo's error."""

    def __init__(self, text: str, number: int = 0) -> None:
        super().__init__(text)
        self.number = number


class TcpListener(QueueListener[TcpLink]):
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        address: str,
        options: LinkOptions,
        check_opening: OpeningCheck,
    ) -> None:
        super().__init__(address)
        self._hub = ListenerHub(socket, monitor, options, address, self.offer, check_opening)
        self._hub.start()

    def close(self) -> None:
        super().close()
        self._hub.stop()


class TcpTransport:
    def listen(self, address: str, *, options: LinkOptions, check_opening: OpeningCheck = plain_only) -> TcpListener:
        """Return a listener. `check_opening` decides which links besides plain ones it accepts (`TcpLink.opening`)."""
        wanted = parse_host_port(address)
        host = _resolve(wanted, address)[0]
        socket = _new_socket(zmq.ROUTER, host, options)
        if options.security is not None:
            secure_listener(socket, options.security)
        socket.ROUTER_MANDATORY = 1
        socket.BACKLOG = _BACKLOG
        monitor = socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        try:
            socket.bind(f"tcp://{host}")
        except zmq.ZMQError as problem:
            _discard(socket, monitor)
            if problem.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{address} is in use") from None
            raise AddressError(f"cannot listen on {address}: {os.strerror(problem.errno or 0)}") from None
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return TcpListener(socket, monitor, f"tcp://{HostPort(wanted.host, port)}", options, check_opening)

    def connect(self, address: str, *, timeout: float, options: LinkOptions, opening: bytes = b"") -> Link:
        """Return a link. `opening`: the header of OPEN, which names the kind of link; empty: a plain one."""
        wanted = parse_host_port(address)
        if wanted.port == 0:
            raise AddressError(f"{address!r} has port 0, which only a listener can use")
        if options.security is not None and options.security.peer is None:
            raise ValueError("an encrypted link needs the listener's key")
        until, hang_ups = time.monotonic() + timeout, 0
        while True:
            hosts: list[HostPort] = []
            unresolved = None
            try:
                hosts = _resolve(wanted, address)
                return _open_one_of(hosts, address, until, options, opening)
            except _UnresolvedError as problem:  # retried: the machine may be starting, and have no name yet
                failed = _AttemptFailedError(str(problem))
                unresolved = Unreachable(wanted.host, problem.number, is_name=True)
            except _AttemptFailedError as problem:
                failed = problem
            hang_ups = hang_ups + 1 if failed.hung_up else 0
            if hang_ups == _HANG_UPS:
                raise LinkRefused(_WHY_REFUSED[_NO_DETAIL])
            left = until - time.monotonic()
            if left <= 0:
                found = unresolved or probe(hosts, min(PROBE_SECONDS, timeout / 4))
                # If a plain socket does not reach the host either, its error says more.
                trouble = failed if found is None or found.is_name or found.is_silent else found
                raise LinkTimeout(f"no answer from {address} within {timeout:g} s: {trouble}", found)
            time.sleep(min(_RETRY_SECONDS, left))


def _open_one_of(hosts: list[HostPort], address: str, until: float, options: LinkOptions, opening: bytes) -> Link:
    """Return a link to one of a host's addresses. Raises the error of the last attempt."""
    failed = _AttemptFailedError(_NO_ANSWER)
    for host in hosts:
        share = until if len(hosts) == 1 else min(until, time.monotonic() + _ONE_OF_MANY_SECONDS)
        try:
            return _open(host, address, share, options, opening)
        except _AttemptFailedError as problem:
            failed = problem
    raise failed


def _open(host: HostPort, address: str, until: float, options: LinkOptions, opening: bytes) -> Link:
    """Connect, send OPEN, wait for ACCEPT. Raises _AttemptFailedError, or LinkClosed if the peer refuses."""
    socket = _new_socket(zmq.DEALER, host, options)
    if options.security is not None:
        secure_connector(socket, options.security)
    events = zmq.Event.CONNECTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED | _HANDSHAKE_FAILED
    monitor = socket.get_monitor_socket(events)
    is_open = False
    try:
        socket.connect(f"tcp://{host}")
        _wait(socket, monitor, zmq.POLLOUT, until, "not reachable")
        socket.send_multipart(encode(FrameKind.OPEN, seq=0, header=opening), zmq.NOBLOCK)
        _wait(socket, monitor, zmq.POLLIN, until, _NO_ANSWER)
        _check_answer(socket, address, options)
        is_open = True
    except zmq.ZMQError as problem:
        raise _AttemptFailedError(str(problem)) from None
    finally:
        if not is_open:
            _discard(socket, monitor)
    hub = ConnectorHub(socket, monitor, options, address)
    hub.link.peer_key = None if options.security is None else options.security.peer
    hub.start()
    return hub.link


def _wait(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], readiness: zmq.PollEvent, until: float, trouble: str
) -> None:
    """Wait until the socket is ready. Raises _AttemptFailedError after `until`, or when the connection fails."""
    poller = zmq.Poller()
    poller.register(socket, readiness)
    poller.register(monitor, zmq.POLLIN)
    while left := max(0.0, until - time.monotonic()):
        ready = dict(poller.poll(math.ceil(left * 1000)))
        if socket in ready:  # checked first: an answer counts even if the connection ended after it
            return
        if monitor in ready:
            event, value = parse_event(monitor.recv_multipart())
            if event == zmq.Event.CONNECTED:
                trouble = _NO_ANSWER
            if event == _NO_DETAIL and value != errno.EPIPE:
                raise _AttemptFailedError(_NO_ANSWER)  # the peer is silent or dead, and has refused nothing
            if event == _NO_DETAIL and socket.MECHANISM == zmq.NULL:
                raise _AttemptFailedError(_NO_ANSWER, hung_up=True)
            if event & _HANDSHAKE_FAILED:
                raise LinkRefused(_WHY_REFUSED[event])
            if event == zmq.Event.CLOSED:
                raise _AttemptFailedError("no connection")  # the event does not say why
            if event == zmq.Event.DISCONNECTED:
                raise _AttemptFailedError("the connection was closed before a link was open")
    raise _AttemptFailedError(trouble)


def _check_answer(socket: zmq.Socket[bytes], address: str, options: LinkOptions) -> None:
    try:
        packet: Packet = decode(socket.recv_multipart(zmq.NOBLOCK), options)
    except FrameError as problem:
        raise LinkClosed(f"{address} gave no usable answer: {problem}") from None
    if packet.kind is not FrameKind.ACCEPT:
        is_bye = packet.kind is FrameKind.BYE
        raise LinkClosed(reason_of(packet.header) if is_bye else f"{address} answered with {packet.kind.name}")


def _resolve(wanted: HostPort, address: str) -> list[HostPort]:
    """Return the numeric addresses of a host, without repeats. Raises AddressError when the name cannot be resolved."""
    try:
        found = sockets.getaddrinfo(wanted.host, wanted.port, type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        number = problem.errno if isinstance(problem, sockets.gaierror) else None
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise _UnresolvedError(f"cannot resolve the host of {address}: {reason}", number or 0) from None
    return list(dict.fromkeys(HostPort(str(entry[4][0]), wanted.port) for entry in found))


def _new_socket(kind: zmq.SocketType, host: HostPort, options: LinkOptions) -> zmq.Socket[bytes]:
    socket = _context().socket(kind)
    socket.LINGER = 0
    socket.IPV6 = int(":" in host.host)
    socket.IMMEDIATE = 1
    socket.RECONNECT_IVL = -1
    overhead = 0 if options.security is None else _CURVE_BYTES
    first = PRELUDE_BYTES + 8 * options.max_parts + options.max_header_bytes + INLINE_BYTES
    socket.MAXMSGSIZE = max(first, options.max_part_bytes) + overhead
    socket.HANDSHAKE_IVL = int(OPEN_SECONDS * 1000)
    socket.SNDHWM = _QUEUE_FRAMES
    socket.RCVHWM = _QUEUE_FRAMES
    return socket


def _discard(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return this process's own zmq context. It is never terminated: that could hang, and the process's end frees
    it."""
    with _contexts_lock:
        pid = os.getpid()  # a context does not survive fork()
        if pid not in _contexts:
            _contexts[pid] = zmq.Context()
        return _contexts[pid]
