"""The handshake on a new control link, after which both ends have joined a group.

    connector (rank 0)                                 listener (rank 1)
    OPEN, header: rdma, backend, listener's device ->  if it is not usable: BYE, why
                                                   <-  offer: nonce, and for ring its port
    child: GO, go: for ring its port               ->  child: GO
    gather ... (JACCL: data exchanged by its two ends) ... gather
    ready                                          <-> ready

It blocks, with a deadline, in the thread that connects, or in one of the listener's own. An end that fails sends the
reason on the control link and closes it, so both ends report the same reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket as sockets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transports.address import parse_host_port
from transports.base import Frame, FrameError, Link, LinkClosed, LinkOptions, LinkTimeout, TransportUnavailable
from transports.rdma.address import BACKENDS, RING, RdmaAddress
from transports.rdma.channel import ChannelClosedError, Job, Record, Word
from transports.rdma.child_process import ChildProcess
from transports.rdma.messages import VERSION
from transports.rdma.probe import choose_device, usable

HANDSHAKE_SECONDS = 20.0
_CHECK_SECONDS = 0.1  # how often a wait for the child checks the control link
_HEAD_START = 0.02  # rank 0 of a ring listens first; a connection that comes too early is retried after a second
_LISTENING_SECONDS = 0.003
MAX_STEP_BYTES = 64 << 10
# How long a writer must have been idle before its reader may sleep. Waking it takes a message on the control link: that
# is slow compared with JACCL, whose reader stays awake between the tokens even of a slow model; on ring it is as fast
# as the group itself.
_REST_SECONDS = {RING: 0.02}
_REST_SECONDS_RDMA = 0.25

_OPENING = b"rdma "
_DEVICE = re.compile(r"\w{0,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The kind of link that a connector asks a listener for."""

    backend: str
    device: str  # the listener's; "": its only active one
    framing: int = VERSION  # ends of different versions could not even receive each other's messages

    @property
    def opening(self) -> bytes:
        return _OPENING + json.dumps(asdict(self)).encode()


def parse_opening(opening: bytes) -> LinkRequest:
    """The request in the header of an OPEN. Raises FrameError if it is not valid."""
    try:
        if not opening.startswith(_OPENING) or len(opening) > 200:
            raise ValueError
        request = LinkRequest(**{"framing": 1, **json.loads(opening.removeprefix(_OPENING))})
        if request.backend not in BACKENDS or not _DEVICE.fullmatch(request.device):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise FrameError("a kind of link that is not known here") from None
    if request.framing != VERSION:
        raise FrameError(f"rdma framing version {request.framing} there, version {VERSION} here")
    return request


@dataclass(frozen=True, slots=True)
class Joined:
    """A child that has joined its group."""

    process: ChildProcess
    nonce: int


def join_as_connector(control: Link, parsed: RdmaAddress, options: LinkOptions) -> Joined:
    """Join a group as rank 0. Raises TransportUnavailable; the control link is closed then."""
    return _Handshake(control, _process_for(control), options).run(lambda shake: _connect(shake, parsed))


def join_as_listener(control: Link, request: LinkRequest, options: LinkOptions) -> Joined:
    """Join a group as rank 1. Raises TransportUnavailable; the control link is closed then."""
    reason = usable(request.backend, request.device)
    if reason is None and request.backend == RING and options.security is not None:
        reason = why_no_ring(_host_of(control.address))
    if reason is not None:
        control.close(reason)
        raise TransportUnavailable(reason)
    return _Handshake(control, _process_for(control), options).run(lambda shake: _accept(shake, request))


def _process_for(control: Link) -> ChildProcess:
    try:
        return ChildProcess()
    except OSError as problem:
        reason = f"no process could be started for the transport: {problem}"
        control.close(reason)
        raise TransportUnavailable(reason) from problem


def why_no_ring(host: str) -> str | None:
    """Why an encrypted link may not use a ring to `host`; None if it may."""
    if host.startswith("127."):
        return None
    return "ring does not encrypt, and this link has keys: use it within one machine only"


def address_of(parsed: RdmaAddress) -> str:
    """The numeric IPv4 address of the host; MLX's ring takes no other. Raises TransportUnavailable."""
    host = parse_host_port(parsed.control).host
    try:
        return str(sockets.getaddrinfo(host, None, sockets.AF_INET, sockets.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise TransportUnavailable(f"ring needs an IPv4 address, and {host} has none") from None


class _Handshake:
    def __init__(self, control: Link, process: ChildProcess, options: LinkOptions) -> None:
        self.control, self.process, self.options = control, process, options
        self.until = time.monotonic() + HANDSHAKE_SECONDS
        self.nonce = 0

    def run(self, steps: Callable[[_Handshake], None]) -> Joined:
        try:
            steps(self)
            return Joined(self.process, self.nonce)
        except (LinkClosed, LinkTimeout, ChannelClosedError, FrameError) as problem:
            reason = self._why(problem)
            self.control.close(reason)
            self.process.end(grace=0.0)
            raise TransportUnavailable(reason) from problem
        except BaseException:
            self.control.abort()
            self.process.end(grace=0.0)
            raise

    def _why(self, problem: Exception) -> str:
        if isinstance(problem, LinkClosed):
            return problem.reason
        if isinstance(problem, ChannelClosedError):
            return f"the transport process ended ({self.process.exit_summary()})"
        return str(problem)

    @property
    def left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise LinkTimeout(f"the two ends have not joined a group within {HANDSHAKE_SECONDS:g} s")
        return left

    # -- the peer ----------------------------------------------------------------------------------------------------

    def send(self, step: str, **fields: object) -> None:
        self.control.send(Frame(json.dumps({"step": step, **fields}).encode()))

    def receive(self, step: str) -> dict[str, Any]:
        header = self.control.recv(self.left).header
        try:
            fields = json.loads(header) if len(header) <= MAX_STEP_BYTES else None
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or fields.get("step") != step:
            raise FrameError(f"the other end did not send {step}")
        return fields

    # -- the child ---------------------------------------------------------------------------------------------------

    def prepare(self, rank: int, backend: str) -> None:
        """Wait until the child is up and send it its job."""
        self.await_message(Word.UP)
        rest_after = _REST_SECONDS.get(backend, _REST_SECONDS_RDMA)
        seconds = math.ceil(self.left) + 1
        is_checked = self.options.checksum_parts is not False
        self.process.start(Job(rank, backend, self.nonce, seconds, self.options.beat_every, rest_after, is_checked))

    def go(self, **config: object) -> None:
        """Have the child join the group."""
        self.process.channel.send(Word.GO, text=json.dumps(config).encode())

    def finish(self, rank: int) -> None:
        """Wait until both children are in the group."""
        while (record := self.await_message(Word.READY, Word.GATHER)).word is Word.GATHER:
            self._exchange(rank, record.text)
        self.send("ready")
        self.receive("ready")

    def _exchange(self, rank: int, mine: bytes) -> None:
        self.send("gather", data=mine.hex())
        try:
            theirs = bytes.fromhex(self.receive("gather")["data"])
        except (KeyError, TypeError, ValueError):
            raise FrameError("the other end sent no usable data for its gather") from None
        if len(theirs) != len(mine):
            raise FrameError(f"the other end gathered {len(theirs)} bytes, not {len(mine)}")
        both = (mine, theirs) if rank == 0 else (theirs, mine)
        self.process.channel.send(Word.GATHERED, text=b"".join(both))

    def await_message(self, *words: Word) -> Record:
        while (record := self.process.channel.recv(min(self.left, _CHECK_SECONDS))) is None or (
            record.word is Word.ALIVE
        ):
            if self.control.closed is not None:
                raise self.control.closed
        if record.word is Word.FAILED:
            raise FrameError(record.text.decode("utf-8", "replace"))
        if record.word not in words:
            raise FrameError(f"the transport process sent {record.word.name}")
        return record


def _connect(shake: _Handshake, parsed: RdmaAddress) -> None:
    offer = shake.receive("offer")
    nonce, port = offer.get("nonce"), offer.get("port")
    if type(nonce) is not int or not 0 <= nonce < 1 << 64:
        raise FrameError("the other end offered no nonce")
    shake.nonce = nonce
    shake.prepare(0, parsed.backend)
    if parsed.backend == RING:
        host = address_of(parsed)
        mine, own_port = _own_address(host)
        shake.go(hosts=[mine, f"{host}:{_checked_port(port)}"])
        while not _is_listening(mine, own_port) and shake.left > 0:
            time.sleep(_LISTENING_SECONDS)
        shake.send("go", port=own_port)
    else:
        shake.go(device=choose_device(parsed.devices[0]).name)
        shake.send("go")
    shake.finish(0)


def _accept(shake: _Handshake, request: LinkRequest) -> None:
    shake.nonce = int.from_bytes(os.urandom(8), "little")
    host = _host_of(shake.control.address)
    mine, own_port = _own_address(host) if request.backend == RING else ("", 0)
    shake.send("offer", nonce=shake.nonce, port=own_port)
    go = shake.receive("go")
    shake.prepare(1, request.backend)
    if request.backend == RING:
        time.sleep(_HEAD_START)
        # Only the port is taken from the peer, so that it cannot make this machine connect to a third one.
        shake.go(hosts=[f"{host}:{_checked_port(go.get('port'))}", mine])
    else:
        shake.go(device=choose_device(request.device).name)
    shake.finish(1)


def _checked_port(port: object) -> int:
    if type(port) is not int or not 0 < port < 1 << 16:
        raise FrameError("the other end named no port")
    return port


def _host_of(address: str) -> str:
    return parse_host_port(address).host


def _is_listening(address: str, port: int) -> bool:
    """Whether the child listens for the peer; always true where that cannot be found out.

    On Linux binding a reusable address fails as soon as a process listens on it, and does not disturb one that is about
    to. Elsewhere it would disturb the child.
    """
    if sys.platform != "linux":
        return True
    with sockets.socket() as trial:
        trial.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            trial.bind((address.rpartition(":")[0], port))
        except OSError:
            return True
    return False


def _own_address(towards: str) -> tuple[str, int]:
    """The address at which the host `towards` reaches this machine, with a port that is free now; and that port."""
    try:
        with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as route:
            route.connect((towards, 9))  # sends nothing
            own = route.getsockname()[0]
        with sockets.socket() as free:
            free.bind((own, 0))
            port = int(free.getsockname()[1])
    except OSError as problem:
        raise FrameError(f"ring cannot be used towards {towards}: {problem}") from None
    return f"{own}:{port}", port
