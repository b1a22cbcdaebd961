"""Takes items of a model from one peer, piece by piece, into the store.

    [ missing pieces -> ask, a window ahead -> TellPiece -> compare its checksum ] -> [ write ] -> [ part complete ]

Each bracket is a thread of its own, so that none does more for a piece than the thread that decrypts it: one writes,
since two that write to one file wait for each other in the system; one forces complete parts to the disk meanwhile.
Pieces come in the order in which they were asked for; any other, one of another size or with other bytes than its
checksum says ends the copy with a sentence. What was written until then stays, and the next copy asks for the rest.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from splitinfer.errors import PeerError, ProtocolError
from splitinfer.store import hearsay
from splitinfer.store.manifest import MAX_BYTES, Manifest, unpack
from splitinfer.store.models import StoredModel
from splitinfer.store.pace import Pace
from splitinfer.store.part import PartWriter, write_whole
from splitinfer.store.parts import Slot, parts_of
from splitinfer.store.pieces import Asked, Piece, check_of, pieces_of
from splitinfer.wire.messages import (
    MOST_PIECES,
    AskDigests,
    AskManifest,
    AskPieces,
    Message,
    TellDigest,
    TellManifest,
    TellPiece,
    Unavailable,
)

Report = Callable[[int, int], None]  # bytes here, bytes in all

_WRITING = 8  # pieces that may wait to be written
_REPORTED = 2**24  # bytes between two reports


class Channel(Protocol):
    """A link to a peer that may be asked for weights.

    ``peer``: who it is, for people. ``sender``: its key, or, where links are not encrypted, its address, to be noted
    with what it sends (``store.hearsay``); empty: it is the coordinator, and what it has is right.
    """

    peer: str
    sender: str

    def send(self, message: Message) -> None:
        """Send a message. Raises TransportError."""
        ...

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        """Wait for the next message and its payload. Raises PeerError, TransportError."""
        ...


@dataclass(frozen=True)
class Remote:
    """A peer that can be asked, and what it has said that the model consists of."""

    channel: Channel
    manifest: Manifest

    def holds(self, manifest: Manifest, numbers: Iterable[int]) -> list[int]:
        """Those items of this machine's own ``manifest`` that the peer has."""
        return [number for number in numbers if self.number(manifest, number) in self.manifest.held]

    def number(self, manifest: Manifest, number: int) -> int | None:
        """The peer's number of an item of this machine's own ``manifest``."""
        item = manifest.items[number]
        if item.tensor is not None:
            theirs = self.manifest.number_of.get(item.name)
            return theirs if theirs is not None and self.manifest.items[theirs].tensor == item.tensor else None
        names = [file.name for file in self.manifest.files]
        return names.index(item.name) if item.name in names else None


def ask_manifest(channel: Channel, weights: str, model: str = "") -> Remote | Unavailable:
    """Ask a peer what a model consists of.

    Raises:
        PeerError, TransportError: the peer is gone, or sent something else.
        ModelError: it sent a manifest that cannot be used.
    """
    channel.send(AskManifest(weights, model))
    message, payload = channel.receive()
    if isinstance(message, Unavailable):
        return message
    if not isinstance(message, TellManifest) or len(payload) != 1 or payload[0].nbytes > MAX_BYTES:
        raise ProtocolError(f"{channel.peer} was asked what a model consists of, and sent something else")
    told = unpack(payload[0])
    if weights and told.fingerprint.digest() != weights:
        raise ProtocolError(f"{channel.peer} was asked for other weights than it describes")
    return Remote(channel, told)


def ask_digests(remote: Remote, manifest: Manifest, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Ask a peer for the digests of items that it has, and yield them as they come, with the numbers of this machine's
    own ``manifest``. To be taken to the end: they arrive in any case.

    Raises:
        PeerError, TransportError: the peer is gone, cannot read them, or sent something else.
    """
    for begin in range(0, len(numbers), MOST_PIECES):
        theirs = [(number, _known(remote.number(manifest, number))) for number in numbers[begin : begin + MOST_PIECES]]
        remote.channel.send(AskDigests(tuple(item for _, item in theirs)))
        for number, item in theirs:
            message, _ = remote.channel.receive()
            if isinstance(message, Unavailable):
                raise PeerError(f"{remote.channel.peer} cannot read {manifest.model}: {message.reason}")
            if not isinstance(message, TellDigest) or message.item != item:
                raise ProtocolError(f"{remote.channel.peer} was asked for digests, and sent something else")
            yield number, message.digest


def copy_small(remote: Remote, stored: StoredModel, numbers: Iterable[int]) -> None:
    """Copy small files that are not in the store yet.

    Raises:
        as ``copy_tensors``.
    """
    here = set(stored.files())
    for number in numbers:
        item = stored.manifest.items[number]
        theirs = remote.number(stored.manifest, number)
        if item.name not in here and theirs is not None:
            size = remote.manifest.items[theirs].nbytes
            if size != item.nbytes:
                raise ProtocolError(f"{remote.channel.peer} has another {item.name}")
            asked = Asked(pieces_of(theirs, remote.manifest.items[theirs]))
            data = b"".join(bytes(_checked(remote, piece, told, data)) for piece, told, data in _coming(remote, asked))
            write_whole(stored.folder, item.name, data)


def copy_tensors(
    remote: Remote, stored: StoredModel, numbers: Sequence[int], report: Report, rate: float | None = None
) -> None:
    """Copy the tensors with these numbers of the store's own manifest, all of which the peer has. ``rate``: bytes a
    second, at most.

    Raises:
        PeerError, TransportError: the peer is gone, cannot send them, or sent something else.
        ModelError: they cannot be written.
    """
    total = sum(stored.manifest.items[number].nbytes for number in numbers)
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(1, "store-finisher") as finisher,
        ThreadPoolExecutor(1, "store-writer") as writer,
    ):  # the threads end first: they use the files
        copying = _Copying(remote, stored, stack, writer, finisher)
        # A burst at the link's speed is what a rate is to prevent.
        asked = Asked(copying.pieces(numbers), at_once=rate is not None)
        reported = 0
        for piece, told, data in _coming(remote, asked, rate):
            copying.take(piece, told, data)
            if copying.done - reported >= _REPORTED:
                report(reported := copying.done, total)
        copying.settle()
        report(total, total)


class _Copying:
    """The parts that are being written: one, or two while the window reaches into the next."""

    def __init__(
        self, remote: Remote, stored: StoredModel, stack: ExitStack, pool: ThreadPoolExecutor, last: ThreadPoolExecutor
    ) -> None:
        self._remote, self._stored, self._stack, self._pool, self._last = remote, stored, stack, pool, last
        self._targets: dict[Piece, tuple[PartWriter, Slot]] = {}
        self._left: dict[PartWriter, int] = {}
        self._writing: deque[Future[None]] = deque()
        self._finishing: list[Future[Path]] = []
        self.done = 0  # bytes that are here

    def pieces(self, numbers: Sequence[int]) -> Iterator[Piece]:
        """The missing pieces, by the peer's numbers; opens each part when its turn comes."""
        for part in parts_of(self._stored.manifest, numbers):
            writer = self._stack.enter_context(PartWriter(self._stored.folder, part))
            missing = writer.missing()
            self.done += sum(info.nbytes for info in part.tensors) - sum(piece.nbytes for piece, _ in missing)
            self._left[writer] = len(missing)
            if missing and self._remote.channel.sender:
                hearsay.note(self._stored.folder, part.name, self._remote.channel.sender)
            if not missing:
                writer.finish()
            theirs = {number: self._remote.number(self._stored.manifest, number) for number in part.numbers}
            for piece, slot in missing:
                asked = Piece(_known(theirs[piece.item]), piece.at, piece.nbytes)
                self._targets[asked] = writer, slot
                yield asked

    def take(self, piece: Piece, told: TellPiece, data: memoryview) -> None:
        """Write a piece that came."""
        writer, slot = self._targets.pop(piece)
        checked = _checked(self._remote, piece, told, data)
        self._writing.append(self._pool.submit(self._write, writer, slot, checked, told.check))
        self.done += piece.nbytes
        while len(self._writing) > _WRITING or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()

    def settle(self) -> None:
        """Wait until all is written."""
        while self._writing:
            self._writing.popleft().result()
        for finishing in self._finishing:
            finishing.result()

    def _write(self, writer: PartWriter, slot: Slot, data: memoryview, check: int) -> None:
        writer.write(slot, data, check)
        self._left[writer] -= 1
        if not self._left[writer]:
            self._finishing.append(self._last.submit(writer.finish))


def _coming(remote: Remote, asked: Asked, rate: float | None = None) -> Iterator[tuple[Piece, TellPiece, memoryview]]:
    """Ask for pieces, a window ahead, and yield them as they come."""
    channel, pace = remote.channel, Pace()
    while True:
        asking = asked.to_ask()
        if asking:
            wait = pace.wait(time.monotonic(), sum(piece.nbytes for piece in asking), rate)
            if wait:
                time.sleep(wait)
            channel.send(AskPieces(tuple((piece.item, piece.at) for piece in asking)))
        if asked.is_done:
            return
        message, payload = channel.receive()
        if isinstance(message, Unavailable):
            raise PeerError(f"{channel.peer} cannot send {remote.manifest.model}: {message.reason}")
        if not isinstance(message, TellPiece) or len(payload) != 1:
            raise ProtocolError(f"{channel.peer} was asked for weights, and sent something else")
        piece = asked.came(message.item, message.at, payload[0].nbytes)
        if piece is None:
            raise ProtocolError(
                f"{channel.peer} sent {payload[0].nbytes:,} bytes as piece {message.at} of item {message.item}, "
                "which is not what it was asked for"
            )
        yield piece, message, payload[0]


def _checked(remote: Remote, piece: Piece, told: TellPiece, data: memoryview) -> memoryview:
    """The bytes of a piece, if they are what its checksum says."""
    if check_of(data) != told.check:
        name = remote.manifest.items[piece.item].name
        raise PeerError(
            f"{remote.channel.peer} sent other bytes of {name} than its checksum says; nothing of them was kept, and "
            "the next try asks for them again"
        )
    return data


def _known(number: int | None) -> int:
    assert number is not None  # the caller has asked ``holds``
    return number
