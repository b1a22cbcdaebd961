"""From a fresh control link to a group that both ends have joined.

    connector (rank 0)                                 listener (rank 1)
    OPEN, header: rdma, backend, listener's device ->  not to be had here: BYE, why
                                                   <-  offer: nonce, and for ring its port
    child: GO, go: for ring its port               ->  child: GO
    gather ... (JACCL: what its two ends tell each other) ... gather
    ready                                          <-> ready

Blocking, with a deadline, in the thread of whoever connects, or in one of the listener's own. Whoever fails says why on
the control link and ends it, so both ends have the same sentence.
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
from transports.rdma.address import BACKENDS, RING, Place
from transports.rdma.channel import ChannelClosedError, Job, Record, Word
from transports.rdma.child_process import ChildProcess
from transports.rdma.probe import choose_device, usable

HANDSHAKE_SECONDS = 20.0
_LOOK_SECONDS = 0.1  # how often a wait for the child looks at the control link
_HEAD_START = 0.02  # rank 0 of a ring listens first; who comes too early waits for a second
_LISTENING_SECONDS = 0.003
_MAX_WORD_BYTES = 64 << 10
# How long a writer must have been idle before its reader may sleep. Waking it takes a message on the control link: for
# JACCL that is as slow as what one has it for, so it stays awake between the tokens even of a slow model; on ring it is
# as fast as the group itself.
_REST_SECONDS = {RING: 0.02}
_REST_SECONDS_RDMA = 0.25

_OPENING = b"rdma "
_DEVICE = re.compile(r"\w{0,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a connector asks a listener for."""

    backend: str
    device: str  # the listener's; "": its only active one

    @property
    def opening(self) -> bytes:
        return _OPENING + json.dumps(asdict(self)).encode()


def parse_opening(opening: bytes) -> Wish:
    """Raises FrameError for what is no wish of ours."""
    try:
        if not opening.startswith(_OPENING) or len(opening) > 200:
            raise ValueError
        wish = Wish(**json.loads(opening.removeprefix(_OPENING)))
        if wish.backend not in BACKENDS or not _DEVICE.fullmatch(wish.device):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise FrameError("a kind of link that is not known here") from None
    return wish


@dataclass(frozen=True, slots=True)
class Joined:
    """A child whose group stands."""

    process: ChildProcess
    nonce: int


def join_as_connector(control: Link, place: Place, options: LinkOptions) -> Joined:
    """Raises TransportUnavailable; the control link is ended then."""
    return _Handshake(control, _process_for(control), options).run(lambda shake: _connect(shake, place))


def join_as_listener(control: Link, wish: Wish, options: LinkOptions) -> Joined:
    """Raises TransportUnavailable; the control link is ended then."""
    reason = usable(wish.backend, wish.device)
    if reason is None and wish.backend == RING and options.security is not None:
        reason = why_not_ring(_host_of(control.address))
    if reason is not None:
        control.close(reason)
        raise TransportUnavailable(reason)
    return _Handshake(control, _process_for(control), options).run(lambda shake: _accept(shake, wish))


def _process_for(control: Link) -> ChildProcess:
    try:
        return ChildProcess()
    except OSError as problem:
        reason = f"no process could be started to carry the frames: {problem}"
        control.close(reason)
        raise TransportUnavailable(reason) from problem


def why_not_ring(host: str) -> str | None:
    """Why a link that is to be encrypted may not use a ring to `host`."""
    if host.startswith("127."):
        return None
    return "ring carries frames in the open, and this link has keys: within one machine only"


def address_of(place: Place) -> str:
    """The numeric IPv4 address of a place, the only kind that MLX's ring knows. Raises TransportUnavailable."""
    host = parse_host_port(place.control).host
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
            return f"the process that was to carry the frames ended ({self.process.last_words()})"
        return str(problem)

    @property
    def left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise LinkTimeout("the two ends have not found each other in time")
        return left

    # -- the peer ----------------------------------------------------------------------------------------------------

    def tell(self, step: str, **words: object) -> None:
        self.control.send(Frame(json.dumps({"step": step, **words}).encode()))

    def hear(self, step: str) -> dict[str, Any]:
        header = self.control.recv(self.left).header
        try:
            words = json.loads(header) if len(header) <= _MAX_WORD_BYTES else None
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, dict) or words.get("step") != step:
            raise FrameError(f"the other end did not say {step}")
        return words

    # -- the child ---------------------------------------------------------------------------------------------------

    def prepare(self, rank: int, backend: str) -> None:
        """Wait for the child and tell it what it is."""
        self.await_word(Word.UP)
        rest_after = _REST_SECONDS.get(backend, _REST_SECONDS_RDMA)
        seconds = math.ceil(self.left) + 1
        self.process.start(Job(rank, backend, self.nonce, seconds, self.options.beat_every, rest_after))

    def go(self, **order: object) -> None:
        self.process.channel.send(Word.GO, text=json.dumps(order).encode())

    def finish(self, rank: int) -> None:
        """Wait until both children are in the group."""
        while (record := self.await_word(Word.READY, Word.GATHER)).word is Word.GATHER:
            self._exchange(rank, record.text)
        self.tell("ready")
        self.hear("ready")

    def _exchange(self, rank: int, mine: bytes) -> None:
        self.tell("gather", data=mine.hex())
        try:
            theirs = bytes.fromhex(self.hear("gather")["data"])
        except (KeyError, TypeError, ValueError):
            raise FrameError("the other end gathered nothing usable") from None
        if len(theirs) != len(mine):
            raise FrameError(f"the other end gathered {len(theirs)} bytes, not {len(mine)}")
        both = (mine, theirs) if rank == 0 else (theirs, mine)
        self.process.channel.send(Word.GATHERED, text=b"".join(both))

    def await_word(self, *words: Word) -> Record:
        while (record := self.process.channel.recv(min(self.left, _LOOK_SECONDS))) is None or (
            record.word is Word.ALIVE
        ):
            if self.control.closed is not None:
                raise self.control.closed
        if record.word is Word.FAILED:
            raise FrameError(record.text.decode("utf-8", "replace"))
        if record.word not in words:
            raise FrameError(f"the own child said {record.word.name}")
        return record


def _connect(shake: _Handshake, place: Place) -> None:
    offer = shake.hear("offer")
    nonce, port = offer.get("nonce"), offer.get("port")
    if type(nonce) is not int or not 0 <= nonce < 1 << 64:
        raise FrameError("the other end offered no nonce")
    shake.nonce = nonce
    shake.prepare(0, place.backend)
    if place.backend == RING:
        host = address_of(place)
        mine, own_port = _own_place(host)
        shake.go(hosts=[mine, f"{host}:{_checked_port(port)}"])
        while not _is_listening(mine, own_port) and shake.left > 0:
            time.sleep(_LISTENING_SECONDS)
        shake.tell("go", port=own_port)
    else:
        shake.go(device=choose_device(place.devices[0]).name)
        shake.tell("go")
    shake.finish(0)


def _accept(shake: _Handshake, wish: Wish) -> None:
    shake.nonce = int.from_bytes(os.urandom(8), "little")
    host = _host_of(shake.control.address)
    mine, own_port = _own_place(host) if wish.backend == RING else ("", 0)
    shake.tell("offer", nonce=shake.nonce, port=own_port)
    go = shake.hear("go")
    shake.prepare(1, wish.backend)
    if wish.backend == RING:
        time.sleep(_HEAD_START)
        # Of what the peer says only the port counts: nobody makes us connect to a third machine.
        shake.go(hosts=[f"{host}:{_checked_port(go.get('port'))}", mine])
    else:
        shake.go(device=choose_device(wish.device).name)
    shake.finish(1)


def _checked_port(port: object) -> int:
    if type(port) is not int or not 0 < port < 1 << 16:
        raise FrameError("the other end named no port")
    return port


def _host_of(address: str) -> str:
    return parse_host_port(address).host


def _is_listening(place: str, port: int) -> bool:
    """Whether the child waits for the peer; where nobody can tell, yes.

    On Linux an address that may be reused is refused as soon as somebody listens on it, and to bind it is in nobody's
    way. Elsewhere it would be in the child's way.
    """
    if sys.platform != "linux":
        return True
    with sockets.socket() as trial:
        trial.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            trial.bind((place.rpartition(":")[0], port))
        except OSError:
            return True
    return False


def _own_place(towards: str) -> tuple[str, int]:
    """The address by which `towards` reaches this machine, with a port that is free now; and that port."""
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
