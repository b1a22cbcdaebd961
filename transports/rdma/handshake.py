"""The handshake on a new control link, after which both ends have joined a group.

    connector (rank 0)                                          listener (rank 1)
    OPEN, header: rdma, backend, device, nonce, macOS ->        if it cannot: BYE, why
    child: JOB                                                  child: JOB
    gather: what the children exchange to meet        <->       gather, as often as they do
    ready                                             <->       ready

It blocks, with a deadline, in the thread that connects, or in one of the listener's own. An end that fails sends the
reason on the control link and closes it, so both ends report the same reason.
"""

from __future__ import annotations

import json
import re
import socket as sockets
import time
from dataclasses import asdict, dataclass

from transports.address import parse_host_port
from transports.base import Frame, FrameError, Link, LinkTimeout, TransportError, TransportUnavailable
from transports.rdma.address import BACKENDS, RdmaAddress
from transports.rdma.channel import ChannelClosedError, Job, Record, Word
from transports.rdma.child_process import ChildProcess
from transports.rdma.messages import VERSION

HANDSHAKE_SECONDS = 20.0
MAX_STEP_BYTES = 64 << 10
_CHECK_SECONDS = 0.1  # how often a wait for the child checks the control link
_END_SECONDS = 0.5  # for a child to end that has not joined; one that waits in MLX cannot
_GATHER, _READY = b"gather ", b"ready"

_OPENING = b"rdma "
_DEVICE = re.compile(r"\w{0,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The kind of link that a connector asks a listener for.

    `device`: the listener's; "": its only active one. `nonce`: what all messages of the link begin with. `macos`: the
    connector's, if it has a device.
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
    """The request in the header of an OPEN. Raises FrameError if it is not valid."""
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
        raise FrameError("a kind of link that is not known here") from None
    return request


def address_of(parsed: RdmaAddress) -> str:
    """The numeric IPv4 address of the host; MLX's ring takes no other. Raises TransportUnavailable."""
    host = parse_host_port(parsed.control).host
    try:
        return str(sockets.getaddrinfo(host, None, sockets.AF_INET, sockets.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise TransportUnavailable(f"ring needs an IPv4 address, and {host} has none") from None


def join(control: Link, job: Job) -> ChildProcess:
    """A child that has joined a group with the peer's. Raises TransportUnavailable; the control link is closed then."""
    child: ChildProcess | None = None
    try:
        child = ChildProcess(job)
        _join(control, child, job.rank)
    except BaseException as problem:
        reason = _why(problem, child)
        control.close(reason)
        if child is not None:
            child.end(_END_SECONDS)
        if isinstance(problem, (TransportError, ChannelClosedError, OSError)):
            raise TransportUnavailable(reason) from problem
        raise
    return child


def _why(problem: BaseException, child: ChildProcess | None) -> str:
    if isinstance(problem, ChannelClosedError) and child is not None:
        return f"the transport process ended ({child.exit_summary()})"
    return str(problem)


def _join(control: Link, child: ChildProcess, rank: int) -> None:
    until = time.monotonic() + HANDSHAKE_SECONDS
    while (record := _await(control, child, until)).word is Word.GATHER:
        control.send(Frame(_GATHER + record.text))
        theirs = _receive(control, _GATHER, until)
        if len(theirs) != len(record.text):
            raise FrameError(f"the other end gathered {len(theirs)} bytes, not {len(record.text)}")
        both = (record.text, theirs) if rank == 0 else (theirs, record.text)
        child.channel.send(Word.GATHERED, text=b"".join(both))
    control.send(Frame(_READY))
    _receive(control, _READY, until)


def _await(control: Link, child: ChildProcess, until: float) -> Record:
    """The child's next GATHER, or READY."""
    while (record := child.channel.recv(min(_left(until), _CHECK_SECONDS))) is None:
        if control.closed is not None:
            raise control.closed
    if record.word is Word.FAILED:
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
