"""Connects and listens at rdma:// addresses: the ends open a tcp link, and over it they join a group.

One port serves both kinds. A connector's OPEN says which kind of link it wants, so a listener at rdma:// returns plain
tcp links unchanged and upgrades the others. A child is started only for a peer that the control link has admitted and
whose request is valid; the number of children is bounded.

    connector (rank 0)                                          listener (rank 1)
    OPEN, header: rdma, backend, device, nonce, macOS ->        if it cannot: BYE, why
    child: JOB                                                  child: JOB
    gather: the children's data to find each other    <->       gather, repeated as needed
    ready                                             <->       ready

This blocks, with a deadline, the thread that connects, or a thread of the listener. An end that fails closes the
control link with the reason, so both ends report the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket as sockets
import threading
import time
from dataclasses import asdict, dataclass, replace

from transports import threads
from transports.address import errors_naming, parse_host_port, split_scheme
from transports.base import (
    Frame,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    LinkTimeout,
    Listener,
    ListenerClosed,
    TransportError,
    TransportUnavailable,
)
from transports.hub import TcpLink
from transports.inbox import QueueListener
from transports.rdma.address import BACKENDS, JACCL, RING, RdmaAddress, parse
from transports.rdma.channel import ChannelClosedError, ChannelRecord, ChannelWord, Job
from transports.rdma.child_process import ChildProcess
from transports.rdma.link import RdmaLink, control_options
from transports.rdma.messages import MAX_STEP_BYTES, VERSION
from transports.rdma.probe import device_for, macos_version, why_not_together
from transports.tcp import TcpListener, TcpTransport

log = logging.getLogger("transports")

# Seconds without a frame after which a link's reader rests. A message on the control link wakes it. That is slow for
# JACCL, whose reader stays awake between the tokens even of a slow model; on ring it is as fast as the group itself.
REST_SECONDS = {JACCL: 0.25, RING: 0.0}
MAX_LINKS = 16  # of one listener, including those being set up; each has a process


class RdmaListener(QueueListener[Link]):
    """Accepts rdma links. `below` accepts the control links and checks their OPEN."""

    def __init__(self, below: TcpListener, parsed: RdmaAddress, options: LinkOptions) -> None:
        self._options, self._below = options, below
        self._room = threading.Semaphore(MAX_LINKS)
        super().__init__(str(replace(parsed, rest=split_scheme(self._below.address)[1])))
        self._thread = threads.make(self._accept_all, f"transports on {self.address}")
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._below.close()  # ends the control links, and with them the rdma links
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _accept_all(self) -> None:
        while True:
            try:
                control = self._below.accept()
            except ListenerClosed:
                return
            if control.opening:
                threads.make(self._upgrade, f"transports joins {control.address}", control).start()
            else:
                self._offer_or_abort(control)

    def _offer_or_abort(self, link: Link) -> None:
        if not self.offer(link):
            link.abort(f"{self.address} stopped listening")

    def _upgrade(self, control: TcpLink) -> None:
        if not self._room.acquire(blocking=False):
            control.close(f"there are {MAX_LINKS} rdma links here already")
            return
        try:
            link = self._join(control, parse_opening(control.opening))
        except Exception as problem:
            self._room.release()  # after any error: 16 lost places would end RDMA here
            control.close(f"{problem}")
            is_known = isinstance(problem, TransportUnavailable)
            log.info("%s: no rdma link with %s: %s", self.address, control.address, problem, exc_info=not is_known)
        else:
            self._offer_or_abort(link)

    def _join(self, control: TcpLink, request: LinkRequest) -> RdmaLink:
        host = parse_host_port(control.address).host
        device = _device_for(request.backend, request.device, host, self._options)
        if device and (reason := why_not_together(macos_version(device), request.macos)) is not None:
            raise TransportUnavailable(reason)
        child = join(control, _job(1, request, device, host))
        address = control.address.replace("tcp://", "rdma://", 1)
        return RdmaLink(address, control, child, self._options, on_end=self._room.release)


class RdmaTransport:
    def __init__(self) -> None:
        self._tcp = TcpTransport()

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        """Return a listener that accepts every backend that a connector requests and this machine can use. The
        address's own backend only appears in `Listener.address`, which peers connect to."""
        parsed, below = parse(address), control_options(options)
        with errors_naming(address, parsed.control):
            return RdmaListener(
                self._tcp.listen(parsed.control, options=below, check_opening=parse_opening), parsed, options
            )

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        """Return a link. `timeout` limits the time to reach the listener; joining a group may take up to
        HANDSHAKE_SECONDS more on busy machines. Also raises TransportUnavailable."""
        parsed = parse(address)
        host = address_of(parsed) if parsed.backend == RING else ""
        device = _device_for(parsed.backend, parsed.devices[0], host, options)
        nonce = int.from_bytes(os.urandom(8), "little")
        request = LinkRequest(parsed.backend, parsed.devices[1], nonce, macos_version(device) if device else "")
        try:
            with errors_naming(address, parsed.control):
                control = self._tcp.connect(
                    parsed.control, timeout=timeout, options=control_options(options), opening=request.opening
                )
        except LinkRefused:
            raise  # the keys do not match, which no other transport would change
        except LinkClosed as problem:
            raise TransportUnavailable(problem.reason) from problem
        child = join(control, _job(0, request, device, host))
        return RdmaLink(address, control, child, options)


def _device_for(backend: str, wanted: str, host: str, options: LinkOptions) -> str:
    """Return this end's device; "" for ring. Raises TransportUnavailable if the backend cannot be used here."""
    device = device_for(backend, wanted)
    if backend == RING and options.security is not None and not host.startswith("127."):
        raise TransportUnavailable("ring does not encrypt, and this link has keys: use it within one machine only")
    return device


def _job(rank: int, request: LinkRequest, device: str, host: str) -> Job:
    seconds = math.ceil(HANDSHAKE_SECONDS) + 1
    return Job(rank, request.backend, request.nonce, seconds, REST_SECONDS[request.backend], device, host)


HANDSHAKE_SECONDS = 20.0
_CHECK_SECONDS = 0.1  # how often a wait for the child checks the control link
_END_SECONDS = 0.5  # for a child that has not joined to end; a child that waits in MLX cannot
_GATHER, _READY = b"gather ", b"ready"

_OPENING = b"rdma "
_DEVICE = re.compile(r"\w{0,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The kind of link that a connector asks a listener for.

    `device`: the listener's; "": its only active one. `nonce`: repeated in every message of the link. `macos`: the
    connector's version, if it has a device.
    """

    backend: str
    device: str
    nonce: int
    macos: str = ""
    framing: int = VERSION  # ends of different versions could not even receive each other's messages

    @property
    def opening(self) -> bytes:
        return _OPENING + json.dumps(asdict(self)).encode()


def parse_opening(opening: bytes) -> LinkRequest:
    """Return the request in the header of an OPEN. Raises FrameError if it is not valid."""
    try:
        if not opening.startswith(_OPENING) or len(opening) > 300:
            raise ValueError
        fields = json.loads(opening.removeprefix(_OPENING))
        framing = fields.pop("framing")
        if type(framing) is int and framing != VERSION:
            raise FrameError(f"rdma framing version {framing} there, version {VERSION} here")
        request = LinkRequest(**fields)
        is_sound = request.backend in BACKENDS and _DEVICE.fullmatch(request.device) and len(request.macos) <= 20
        if not is_sound or type(request.nonce) is not int or not 0 <= request.nonce < 1 << 64:
            raise ValueError
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError):
        raise FrameError("unknown kind of link") from None
    return request


def address_of(parsed: RdmaAddress) -> str:
    """Return the numeric IPv4 address of the host; MLX's ring takes no other. Raises TransportUnavailable."""
    host = parse_host_port(parsed.control).host
    try:
        return str(sockets.getaddrinfo(host, None, sockets.AF_INET, sockets.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise TransportUnavailable(f"ring needs an IPv4 address, and {host} has none") from None


def join(control: Link, job: Job) -> ChildProcess:
    """Return a child that has joined a group with the peer's child. Close the control link and raise
    TransportUnavailable if they cannot join."""
    child: ChildProcess | None = None
    try:
        child = ChildProcess(job)
        _join(control, child, job.rank)
    except BaseException as problem:
        reason = str(problem)
        if isinstance(problem, ChannelClosedError) and child is not None:
            reason = f"the transport process ended ({child.exit_summary()})"
        control.close(reason)
        if child is not None:
            child.end(_END_SECONDS)
        if isinstance(problem, (TransportError, ChannelClosedError, OSError)):
            raise TransportUnavailable(reason) from problem
        raise
    return child


def _join(control: Link, child: ChildProcess, rank: int) -> None:
    until = time.monotonic() + HANDSHAKE_SECONDS
    while (record := _await(control, child, until)).word is ChannelWord.GATHER:
        control.send(Frame(_GATHER + record.text))
        theirs = _receive(control, _GATHER, until)
        if len(theirs) != len(record.text):
            raise FrameError(f"the other end gathered {len(theirs)} bytes, not {len(record.text)}")
        both = (record.text, theirs) if rank == 0 else (theirs, record.text)
        child.channel.send(ChannelWord.GATHERED, text=b"".join(both))
    control.send(Frame(_READY))
    _receive(control, _READY, until)


def _await(control: Link, child: ChildProcess, until: float) -> ChannelRecord:
    """Wait for the child's next record, GATHER or READY, and return it."""
    while (record := child.channel.recv(min(_left(until), _CHECK_SECONDS))) is None:
        if control.closed is not None:
            raise control.closed
    if record.word is ChannelWord.FAILED:
        raise FrameError(record.text.decode("utf-8", "replace"))
    return record


def _receive(control: Link, step: bytes, until: float) -> bytes:
    header = control.recv(_left(until)).header
    if not header.startswith(step) or len(header) > MAX_STEP_BYTES:
        raise FrameError(f"the other end did not send {step.decode().strip()}")
    return header.removeprefix(step)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise LinkTimeout(f"the two ends have not joined a group within {HANDSHAKE_SECONDS:g} s")
    return left
