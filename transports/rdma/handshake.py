"""The handshake on a new control link, after which both ends have joined a group.

    connector (rank 0)                                 listener (rank 1)
    OPEN, header: rdma, backend, listener's device ->  if it is not usable: BYE, why
    ask: its macOS, a parked group if it has one   ->  if the two macOS do not fit each other: BYE, why
                                                   <-  offer: nonce, and for ring its port; or that group
    child: GO, go: for ring its port               ->  child: GO
    gather ... (JACCL: data exchanged by its two ends) ... gather
    ready                                          <-> ready

If both have the group parked and agree on how many messages went through it (`groups`), the children are told RENEW in
place of GO, and nothing is gathered.

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
from dataclasses import asdict, dataclass, replace
from typing import Any

from transports.address import parse_host_port
from transports.base import (
    Frame,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkTimeout,
    TransportError,
    TransportUnavailable,
)
from transports.rdma import leftovers
from transports.rdma.address import BACKENDS, RING, RdmaAddress
from transports.rdma.channel import ChannelClosedError, Job, Record, Word
from transports.rdma.child_process import LEAVE_SECONDS, ChildProcess
from transports.rdma.groups import Group, kept_groups
from transports.rdma.macos import why_not_together
from transports.rdma.messages import VERSION
from transports.rdma.probe import choose_device, macos_version, usable
from transports.rdma.symptoms import explained

HANDSHAKE_SECONDS = 20.0
_RENEW_SECONDS = 3.0  # for both children to add one number; it takes microseconds, unless the group hangs
_MAX_MISSED = 1000  # messages; a reader sleeps through some where a link ends before it could be woken
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


class RenewalFailed(TransportUnavailable):
    """A parked group could not be used again; its processes have ended, and another attempt makes a new one."""


def join_as_connector(control: Link, parsed: RdmaAddress, options: LinkOptions) -> Group:
    """Join a group as rank 0. Raises TransportUnavailable; the control link is closed then."""
    shake = _Handshake(control, options, (str(parsed), control.peer_key))
    return shake.run(lambda: _connect(shake, parsed))


def join_as_listener(control: Link, request: LinkRequest, options: LinkOptions) -> Group:
    """Join a group as rank 1. Raises TransportUnavailable; the control link is closed then."""
    reason = usable(request.backend, request.device)
    if reason is None and request.backend == RING and options.security is not None:
        reason = why_no_ring(parse_host_port(control.address).host)
    if reason is not None:
        control.close(reason)
        raise TransportUnavailable(reason)
    shake = _Handshake(control, options, ("", control.peer_key))
    return shake.run(lambda: _accept(shake, request))


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
    """`peer`: what identifies the process at the other end (`Group`)."""

    def __init__(self, control: Link, options: LinkOptions, peer: tuple[str, str | None]) -> None:
        self.control, self.options, self.peer = control, options, peer
        self.until = time.monotonic() + HANDSHAKE_SECONDS
        self.nonce = 0
        self.device = ""
        self.group: Group | None = None

    def run(self, steps: Callable[[], None]) -> Group:
        try:
            steps()
            assert self.group is not None
            self.group.is_kept = False
            return self.group
        except (TransportError, ChannelClosedError) as problem:
            reason = self._why(problem)
            self.control.close(reason)
            was_kept = self.is_kept
            self._end_group()
            raise (RenewalFailed if was_kept else TransportUnavailable)(reason) from problem
        except BaseException:
            self.control.abort()
            self._end_group()
            raise

    def _why(self, problem: Exception) -> str:
        if isinstance(problem, LinkClosed):
            return problem.reason
        if isinstance(problem, ChannelClosedError):
            reason = f"the transport process ended ({self.process.exit_summary()})"
        else:
            reason = str(problem)
        return _with_remedy(reason, self.device) if self.device else reason

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

    # -- the group ---------------------------------------------------------------------------------------------------

    @property
    def process(self) -> ChildProcess:
        assert self.group is not None
        return self.group.process

    @property
    def is_kept(self) -> bool:
        """Whether the group was parked by an earlier link."""
        return self.group is not None and self.group.is_kept

    def obtain(self, device: str, is_it: Callable[[Group], bool]) -> None:
        """Take the parked group on `device` for which `is_it`, or start a process for a new one; "" for ring."""
        self._end_group()
        self.device = device
        found = kept_groups.obtain(device, is_it, lambda: self.control.closed is None) if device else None
        if isinstance(found, Group):
            self.group = found
            return
        try:
            self.group = Group(ChildProcess(found), self.peer)
        except OSError as problem:
            raise TransportUnavailable(f"no process could be started for the transport: {problem}") from problem

    def _end_group(self) -> None:
        if self.group is not None:
            self.process.end(LEAVE_SECONDS if self.device else 0.0)
            self.group = None

    # -- the child ---------------------------------------------------------------------------------------------------

    def prepare(self, rank: int, backend: str) -> None:
        """Wait until the child is up and send it its job."""
        assert self.group is not None
        self.group.number = self.nonce
        self.await_message(Word.UP)
        rest_after = _REST_SECONDS.get(backend, _REST_SECONDS_RDMA)
        seconds = math.ceil(self.left) + 1
        job = Job(rank, backend, self.nonce, seconds, self.options.beat_every, rest_after, self._is_checked)
        self.process.start(replace(job, device=self.device, leave_seconds=LEAVE_SECONDS) if self.device else job)

    def renew(self, num_missed: int = 0) -> None:
        """Have the parked child begin again, after it has received what it missed."""
        self.until = min(self.until, time.monotonic() + _RENEW_SECONDS)
        self.process.renew(num_missed, nonce=self.nonce, alive_every=self.options.beat_every, checked=self._is_checked)

    @property
    def _is_checked(self) -> bool:
        return self.options.checksum_parts is not False

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
    device = _device(parsed.backend, parsed.devices[0])
    shake.obtain(device, lambda group: group.peer == shake.peer)
    kept = shake.group if shake.is_kept else None
    parked = {"group": kept.number, "messages": kept.num_messages} if kept else {}
    shake.send("ask", macos=macos_version(device), **parked)
    offer = shake.receive("offer")
    nonce, port = offer.get("nonce"), offer.get("port")
    if type(nonce) is not int or not 0 <= nonce < 1 << 64:
        raise FrameError("the other end offered no nonce")
    shake.nonce = nonce
    if kept is not None and offer.get("kept") is True:
        shake.renew()
        shake.send("go")
        shake.finish(0)
        return
    if kept is not None:
        shake.obtain(device, lambda _: False)
    shake.prepare(0, parsed.backend)
    if parsed.backend == RING:
        host = address_of(parsed)
        mine, own_port = _own_address(host)
        shake.process.go(hosts=[mine, f"{host}:{_checked_port(port)}"])
        while not _is_listening(mine, own_port) and shake.left > 0:
            time.sleep(_LISTENING_SECONDS)
        shake.send("go", port=own_port)
    else:
        shake.process.go(device=device)
        shake.send("go")
    shake.finish(0)


def _accept(shake: _Handshake, request: LinkRequest) -> None:
    ask = shake.receive("ask")
    device = _device(request.backend, request.device)
    if device and (reason := why_not_together(macos_version(device), str(ask.get("macos"))[:20])) is not None:
        raise FrameError(reason)
    number, num_sent = ask.get("group"), ask.get("messages")
    shake.obtain(device, lambda group: group.peer == shake.peer and group.number == number)
    num_missed = 0
    if shake.group is not None and shake.is_kept:
        num_missed = num_sent - shake.group.num_messages if type(num_sent) is int else -1
        if not 0 <= num_missed <= _MAX_MISSED:
            shake.obtain(device, lambda _: False)
    shake.nonce = int.from_bytes(os.urandom(8), "little")
    host = parse_host_port(shake.control.address).host
    mine, own_port = _own_address(host) if request.backend == RING else ("", 0)
    shake.send("offer", nonce=shake.nonce, port=own_port, kept=shake.is_kept)
    go = shake.receive("go")
    # Only the port is taken from the peer, so that it cannot make this machine connect to a third one.
    port = _checked_port(go.get("port")) if request.backend == RING else 0
    if shake.is_kept:
        shake.renew(num_missed)
    else:
        shake.prepare(1, request.backend)
        if request.backend == RING:
            time.sleep(_HEAD_START)
            shake.process.go(hosts=[f"{host}:{port}", mine])
        else:
            shake.process.go(device=device)
    shake.finish(1)


def _device(backend: str, wanted: str) -> str:
    """This end's device; "" for ring. Raises TransportUnavailable."""
    return "" if backend == RING else choose_device(wanted)


def _with_remedy(reason: str, device: str) -> str:
    """The reason of a failed join, and what to do about it where that is known."""
    advised = explained(reason)
    hint = leftovers.hint(device) if advised != reason else ""
    return f"{advised}; {hint}" if hint else advised


def _checked_port(port: object) -> int:
    if type(port) is not int or not 0 < port < 1 << 16:
        raise FrameError("the other end named no port")
    return port


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
