"""Answers requests for weights, each link's on its own thread. Reading must not delay the engine, which may be reading
its own layers, or the thread that receives for all links.

The handshake decides which peers may ask (``engine.worker.handshake``). A coordinator lets its workers copy the model
that it runs. A worker lets others copy the model whose layers it holds, the models in its store, and those that the
hub's client keeps on this machine. A folder is never copied only because a peer names it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from splitinfer.engine.links.connection import Connection
from splitinfer.errors import ModelError, ProtocolError, SplitinferError
from splitinfer.models.folder.checkpoint import Checkpoint, open_stored, source_of
from splitinfer.models.folder.hub import local_snapshot, open_local
from splitinfer.weights.manifest import pack
from splitinfer.weights.models import ModelStore
from splitinfer.weights.ranges import BESIDE_SERVING, Pace, checksum
from splitinfer.weights.source import Source
from splitinfer.wire.messages import AskManifest, AskRanges, Message, TellManifest, TellRange, Unavailable
from transports import Frame, Link, LinkClosed, TransportError

log = logging.getLogger(__name__)

Running = tuple[Checkpoint, str]  # a model, and its name
Find = Callable[[str, str], Source | None]
"""Opens a model by its fingerprint's digest, or, if that is empty, by name, if it may be copied. Raises ModelError."""

_MAX_WAITING = 4096  # requests; an honest peer has a window of a few dozen
_MOST_READERS = 4  # at a time


class Receiver(Protocol):
    """One end of a link. ``send`` raises TransportError, ProtocolError, and ``receive`` ProtocolError."""

    @property
    def link(self) -> Link: ...

    def send(self, message: Message, *parts: memoryview) -> None: ...

    def receive(self, item: Frame) -> Message: ...


class WeightAnswers:
    """Answers the requests on ``end``. ``rate``: returns the bytes per second to send now; ``None``: no limit."""

    def __init__(self, end: Receiver, find: Find, rate: Callable[[], float | None] = lambda: None) -> None:
        self._end, self._find, self._rate = end, find, rate
        self._requests: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._source: Source | None = None
        self._pace, self._is_over = Pace(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Queue a request without waiting, on any thread."""
        if self._requests.qsize() > _MAX_WAITING:
            self._end.link.abort("it requested more than it took")
        self._requests.put(frame)

    def close(self) -> None:
        """End the thread, because the link has ended."""
        self._is_over.set()
        self._requests.put(None)

    def _run(self) -> None:
        try:
            while (frame := self._requests.get()) is not None and not self._is_over.is_set():
                self._answer(self._end.receive(frame))
        except TransportError as error:
            log.info("%s takes no more weights: %s", self._end.link.address, error)
        except ProtocolError as error:
            log.warning("dropped %s: %s", self._end.link.address, error)
            self._end.link.close(str(error))
        except Exception as error:
            log.exception("weights could not be sent")
            self._end.link.close(f"weights could not be sent ({type(error).__name__})")
        finally:
            self._forget()

    def _answer(self, message: Message) -> None:
        try:
            if isinstance(message, AskManifest):
                self._reply_manifest(message)
            elif isinstance(message, AskRanges):
                self._reply_ranges(message)
        except (ProtocolError, TransportError):
            raise
        except SplitinferError as error:
            log.warning("%s cannot have weights: %s", self._end.link.address, error)
            self._end.send(Unavailable(str(error)))

    def _reply_manifest(self, request: AskManifest) -> None:
        self._forget()
        self._source = self._find(request.weights, request.model)
        if self._source is None:
            raise ModelError(f"{request.model or 'a model with these weights'} is not here")
        log.info("%s copies weights of %s", self._end.link.address, self._source.manifest.model)
        self._end.send(TellManifest(), memoryview(pack(self._source.manifest)))

    def _reply_ranges(self, request: AskRanges) -> None:
        if self._source is None:
            raise ProtocolError("weights were asked for before what a model consists of")
        for each in request.ranges:
            data = self._source.read(each.file, each.begin, each.end)
            if self._is_over.wait(self._pace.wait(time.monotonic(), each.nbytes, self._rate())):
                return
            self._end.send(TellRange(each, checksum(data)), memoryview(data))

    def _forget(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None


class Readers:
    """The peers that copy weights from a worker's port. ``is_serving``: returns whether the pipeline may have requests;
    then readers get a bounded rate."""

    def __init__(self, find: Find, is_serving: Callable[[], bool]) -> None:
        self._find, self._is_serving = find, is_serving
        self._lock = threading.Lock()
        self._answers: dict[int, WeightAnswers] = {}  # by the connection's identity

    @property
    def reason_against(self) -> str | None:
        """Why another reader is refused now; ``None`` if it is admitted."""
        with self._lock:
            count = len(self._answers)
        return None if count < _MOST_READERS else f"{count} others copy weights from here; try again when one is done"

    def deliver(self, connection: Connection, item: Frame | LinkClosed) -> None:
        """Handle a frame or the end of a reader's link, on the transport's thread."""
        with self._lock:
            answers = self._answers.get(id(connection))
            if isinstance(item, LinkClosed):
                self._answers.pop(id(connection), None)
            elif answers is None:
                answers = self._answers[id(connection)] = WeightAnswers(connection, self._find, self._rate)
        if answers is not None and isinstance(item, Frame):
            answers.put(item)
        elif answers is not None:
            answers.close()

    def _rate(self) -> float | None:
        return BESIDE_SERVING if self._is_serving() else None


def find_running(running: Callable[[], Iterable[Running]]) -> Find:
    """Return a function that finds a model that this machine runs."""

    def find(weights: str, model: str) -> Source | None:
        for here in running():
            if here[0].fingerprint().digest() == weights if weights else here[1] == model:
                return source_of(*here)
        return None

    return find


def find_anywhere(running: Callable[[], Iterable[Running]], store: ModelStore | None) -> Find:
    """Return a function that finds a model that a worker lets others copy."""
    find_held = find_running(running)
    return lambda weights, model: (
        find_held(weights, model) or _find_stored(store, weights, model) or _find_hub(weights, model)
    )


def _find_stored(store: ModelStore | None, weights: str, model: str) -> Source | None:
    if store is None:
        return None
    found = [store.find(weights)] if weights else store.named(model)
    if len(found) > 1:
        which = ", ".join(one.digest for one in found if one is not None)
        raise ModelError(f"there are {len(found)} models named {model} here ({which}); ask for one of them")
    return source_of(open_stored(found[0]), found[0].manifest.model) if found and found[0] is not None else None


def _find_hub(weights: str, model: str) -> Source | None:
    """Return the model with this hub id if the hub's client keeps it here, otherwise None."""
    if weights or local_snapshot(model) is None:
        return None
    checkpoint = open_local(model)
    return None if checkpoint is None else source_of(checkpoint, model)
