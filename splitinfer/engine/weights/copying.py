"""Copies ranges of a model's files from one peer into the store.

    [ missing ranges -> ask, a window ahead -> TellRange -> compare its checksum ] -> [ write ] -> [ force to the disk ]

Each bracket is a thread of its own, so that none of them is slower than the thread that decrypts. Ranges must arrive in
the order of the requests, otherwise the copy ends with an error. The bytes written until then stay.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, Self

from splitinfer.common.tensor_info import TensorInfo
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import ModelError, PeerError, ProtocolError, Refused, WorkerUnreachable
from splitinfer.models.folder.checkpoint import open_stored
from splitinfer.models.load.loader import count_layers, survey
from splitinfer.weights.copied_file import CopiedFile, write_whole
from splitinfer.weights.manifest import MAX_BYTES, Manifest, unpack
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.weights.ranges import WINDOW, Pace, Span, checksum, is_in, missing, pieces, size
from splitinfer.wire.headers import Session
from splitinfer.wire.messages import (
    MOST_RANGES,
    AskManifest,
    AskRanges,
    Fault,
    Hello,
    Message,
    Range,
    Refuse,
    TellManifest,
    TellRange,
    Unavailable,
)
from transports import Frame, Link, LinkOptions, LinkRefused, LinkTimeout, TransportError, connect

OnCopied = Callable[[int, int], None]  # bytes here, bytes in total

_ASKED = 8 * 2**20  # bytes that one message asks for, so that there are few messages
_WAITING = 0.2  # seconds between checks whether another process still copies
_WRITING = 8  # ranges that may wait to be written
_REPORTED = 2**24  # bytes between two reports
_SYNCED = 2**26  # bytes that are forced to the disk together; a killed process copies at most as many again


class WeightChannel(Protocol):
    """A link to a ``peer`` that answers requests for weights. ``receive`` waits for the next message and its payload.
    Both methods raise TransportError; ``receive`` also raises PeerError."""

    peer: str

    def send(self, message: Message) -> None: ...

    def receive(self) -> tuple[Message, Sequence[memoryview]]: ...


@dataclass(frozen=True)
class Remote:
    """A peer that answers requests, and its manifest of the model."""

    channel: WeightChannel
    manifest: Manifest

    def holds(self, info: TensorInfo) -> bool:
        """Return whether the peer has this tensor."""
        return self.manifest.by_name.get(info.name) == info and is_in(
            (info.begin, info.end), self.manifest.held.get(info.file, ())
        )

    def read(self, file: str) -> bytes:
        """Return the bytes of a small file. Raises as ``copy``."""
        if file not in self.manifest.sizes:
            raise ProtocolError(f"{self.channel.peer} has no {file}")
        ranges = (Range(file, *span) for span in pieces([(0, self.manifest.sizes[file])]))
        return b"".join(bytes(data) for _, data in _receive(self, ranges))


def request_manifest(channel: WeightChannel, weights: str, model: str = "") -> Remote | Unavailable:
    """Ask a peer for a model's manifest, by the digest of its ``weights`` or, if that is empty, by name.

    Raises:
        PeerError, TransportError: the peer is gone, or sent something else.
        ModelError: the manifest cannot be used.
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


def copy_small(remote: Remote, stored: StoredModel, files: Iterable[str]) -> None:
    """Copy the small files that are not in the store yet. Raises as ``copy``."""
    here = set(stored.files())
    for file in files:
        if file not in here:
            if remote.manifest.sizes.get(file) != stored.manifest.sizes[file]:
                raise ProtocolError(f"{remote.channel.peer} has another {file}")
            write_whole(stored.folder, file, remote.read(file))


def copy(
    remote: Remote,
    store: ModelStore,
    stored: StoredModel,
    wanted: Iterable[TensorInfo],
    report: OnCopied,
    *,
    rate: float | None = None,
    waits: Callable[[], None] = lambda: None,
) -> None:
    """Copy tensors that the peer has. ``rate``: the most bytes per second. ``waits``: called a few times a second while
    another process copies the same model.

    Raises:
        PeerError, TransportError: the peer is gone, cannot send the tensors, or sent something else.
        ModelError: the tensors cannot be written, or there is no room.
    """
    tensors = list(wanted)

    def wait() -> None:
        waits()
        time.sleep(_WAITING)

    with stored.copying(wait):
        store.check_room(stored.lacking(tensors))
        with (
            ExitStack() as stack,
            ThreadPoolExecutor(1, "store-finisher") as finisher,
            ThreadPoolExecutor(1, "store-writer") as writer,
        ):  # the threads end first: they use the files
            copying = _Copying(stored, stack, writer, finisher, report)
            for asked, data in _receive(remote, copying.ranges(tensors), rate):
                copying.take(asked, data)
            copying.settle()


class _Copying:
    """The files that are being written: one, or two while the window reaches into the next file."""

    def __init__(
        self,
        stored: StoredModel,
        stack: ExitStack,
        writer: ThreadPoolExecutor,
        finisher: ThreadPoolExecutor,
        report: OnCopied,
    ) -> None:
        self._stored, self._stack, self._writer, self._finisher, self._report = stored, stack, writer, finisher, report
        self._files: dict[str, CopiedFile] = {}
        self._left: dict[str, int] = {}  # by file: the bytes that are not written yet
        self._writing: deque[Future[None]] = deque()
        self._finishing: list[Future[None]] = []
        self._done, self._total, self._reported, self._unsynced = 0, 0, 0, 0

    def ranges(self, tensors: Sequence[TensorInfo]) -> Iterator[Range]:
        """Yield the missing ranges, and open each file before its first range."""
        wanted: dict[str, list[Span]] = {}
        for info in sorted(tensors, key=lambda info: info.file):
            wanted.setdefault(info.file, []).append((info.begin, info.end))
        self._total = sum(info.nbytes for info in tensors)
        for name, spans in wanted.items():
            file = self._files[name] = self._stack.enter_context(self._stored.open(name))
            left = missing(spans, file.here)
            self._left[name] = size(left)
            self._done += size(missing(spans, left))
            if not left:
                file.finish()
            yield from (Range(name, *span) for span in pieces(left))

    def take(self, asked: Range, data: memoryview) -> None:
        """Write a received range, on the writer's thread."""
        self._writing.append(self._writer.submit(self._write, asked, data))
        while len(self._writing) > _WRITING or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()
        self._done += asked.nbytes
        if self._done - self._reported >= _REPORTED:
            self._reported = self._done
            self._report(self._done, self._total)

    def settle(self) -> None:
        """Wait until all ranges are written and on the disk."""
        for future in self._writing:
            future.result()
        for future in self._finishing:
            future.result()
        self._report(self._total, self._total)

    def _write(self, asked: Range, data: memoryview) -> None:
        file = self._files[asked.file]
        file.write(asked.begin, data)
        self._left[asked.file] -= asked.nbytes
        self._unsynced += asked.nbytes
        if not self._left[asked.file]:
            self._finishing.append(self._finisher.submit(file.finish))
        elif self._unsynced >= _SYNCED:
            self._finishing.append(self._finisher.submit(file.sync))
            self._unsynced = 0


def _receive(remote: Remote, ranges: Iterable[Range], rate: float | None = None) -> Iterator[tuple[Range, memoryview]]:
    """Ask for ranges, a window ahead, and yield their bytes as they arrive, each checked by its checksum."""
    due, pace = deque[Range](), Pace()
    # With a rate, each message asks for one range: several would arrive in a burst at the link's speed.
    for asking in _bunches(ranges, _ASKED if rate is None else 1):
        while due and (len(due) > MOST_RANGES or sum(each.nbytes for each in (*due, *asking)) > WINDOW):
            yield _next(remote, due)
        wait = pace.wait(time.monotonic(), sum(each.nbytes for each in asking), rate)
        if wait:
            time.sleep(wait)
        remote.channel.send(AskRanges(tuple(asking)))
        due.extend(asking)
    while due:
        yield _next(remote, due)


def _next(remote: Remote, due: deque[Range]) -> tuple[Range, memoryview]:
    """Receive the range that is due, and return it with its bytes."""
    channel = remote.channel
    message, payload = channel.receive()
    if isinstance(message, Unavailable):
        raise PeerError(f"{channel.peer} cannot send {remote.manifest.model}: {message.reason}")
    if not isinstance(message, TellRange) or len(payload) != 1:
        raise ProtocolError(f"{channel.peer} was asked for weights, and sent something else")
    asked, data = due.popleft(), payload[0]
    if message.asked != asked or data.nbytes != asked.nbytes:
        raise ProtocolError(f"{channel.peer} sent other bytes of {asked.file} than it was asked for")
    if checksum(data) != message.check:
        raise PeerError(
            f"{channel.peer} sent other bytes of {asked.file} than its checksum says; they were not kept, and the next "
            "try asks for them again"
        )
    return asked, data


def _bunches(ranges: Iterable[Range], nbytes: int) -> Iterator[list[Range]]:
    """Yield the ranges in lists of about ``nbytes`` bytes and at most ``MOST_RANGES`` ranges."""
    bunch = list[Range]()
    for each in ranges:
        bunch.append(each)
        if len(bunch) == MOST_RANGES or sum(one.nbytes for one in bunch) >= nbytes:
            yield bunch
            bunch = []
    if bunch:
        yield bunch


@dataclass(frozen=True, slots=True)
class Pulled:
    """The outcome of a copy. ``nbytes``: the bytes of copied tensors; ``lacking``: the bytes of wanted tensors that the
    peer does not have."""

    stored: StoredModel
    nbytes: int
    lacking: int


def pull(
    channel: WeightChannel,
    store: ModelStore,
    model: str,
    layers: Span | None,
    report: OnCopied,
    rate: float | None = None,
) -> Pulled:
    """Copy a model's small files, and the peer's tensors that its ``layers`` (half-open; ``None``: all) read, because a
    person asks for it. ``rate``: the most bytes per second.

    Raises:
        ModelError: there is no room, or the model does not have these layers.
        PeerError, TransportError: the peer does not have the model, is gone, or sent something else.
    """
    remote = request_manifest(channel, "", model)
    if isinstance(remote, Unavailable):
        raise Refused(f"{channel.peer} has no weights for this machine: {remote.reason}")
    stored = store.begin(remote.manifest)
    with stored.hold():
        copy_small(remote, stored, stored.manifest.small(tokenizer=True))
        here = stored.tensors()
        wanted = [info for info in _tensors_of(stored, layers) if info.name not in here]
        coming = [info for info in wanted if remote.holds(info)]
        copy(remote, store, stored, coming, report, rate=rate, waits=lambda: report(0, _nbytes(coming)))
    return Pulled(stored, _nbytes(coming), _nbytes(wanted) - _nbytes(coming))


def _tensors_of(stored: StoredModel, layers: Span | None) -> list[TensorInfo]:
    """Return the tensors that these layers read; ``None``: all layers."""
    if layers is None:
        return list(stored.manifest.tensors)
    checkpoint = open_stored(stored)
    num_layers = count_layers(checkpoint)
    if not layers[0] < layers[1] <= num_layers:
        last = layers[1] - 1
        raise ModelError(f"{stored.manifest.model} has layers 0 to {num_layers - 1}, not all of {layers[0]} to {last}")
    return [stored.manifest.by_name[name] for name in sorted(survey(checkpoint, *layers, None).tensors)]


def _nbytes(tensors: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in tensors)


_REPLY_SECONDS = 60.0  # for a peer to read a range from a busy disk; a dead link ends in 3 s


class WeightReader:
    """A link to a worker's port, as a ``WeightChannel``.

    Raises:
        WorkerUnreachable: nothing answers at ``address``.
        Refused: the worker does not admit this machine, or is busy.
    """

    def __init__(self, address: str, options: LinkOptions, timeout: float, name: str = "") -> None:
        self.peer = f"worker {name} ({address})" if name else f"the worker at {address}"
        self._session = Session(opened=True)
        self._link = self._connect(address, options, timeout)
        try:
            self.send(Hello("reader", machine_name(), uuid.uuid4().hex, own_versions()))
            self.receive()  # a welcome; a refusal raises
        except BaseException:
            self._link.abort("the handshake failed")
            raise

    def _connect(self, address: str, options: LinkOptions, timeout: float) -> Link:
        try:
            return connect(address, timeout=timeout, options=options)
        except LinkRefused as error:
            own = None if options.security is None else options.security.own.public
            remedy = "" if own is None else f"; admit this machine there: splitinfer pair {own}"
            raise Refused(f"{self.peer} cannot be asked for weights: {error}{remedy}") from error
        except TransportError as error:
            unreachable = error.unreachable if isinstance(error, LinkTimeout) else None
            why = error if unreachable is None else explain_here(unreachable)
            raise WorkerUnreachable(f"{self.peer} cannot be asked for weights: {why}") from error

    def send(self, message: Message) -> None:
        """Send a message, as ``WeightChannel.send``."""
        try:
            self._link.send(Frame(self._session.encode(message)))
        except TransportError as error:
            raise self._gone(error) from error

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        """Wait for the next message, as ``WeightChannel.receive``."""
        try:
            frame = self._link.recv(timeout=_REPLY_SECONDS)
        except TransportError as error:
            raise self._gone(error) from error
        message = self._session.decode(frame.header)
        if isinstance(message, Refuse | Fault):
            raise Refused(f"{self.peer} refused: {message.reason}")
        return message, [memoryview(part) for part in frame.parts]

    def _gone(self, error: TransportError) -> PeerError:
        return PeerError(
            f"{self.peer} is gone: {error}; what was copied until then stays, and the next try goes on from it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close("nothing more is wanted")
