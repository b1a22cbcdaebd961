"""Answers one link's asks for weights, in a thread of its own: reading must hold up neither the engine nor the thread
that receives for all links.

    AskManifest -> find the model -> TellManifest, or Unavailable
    AskPieces   -> read each -> checksum -> TellPiece ..., or Unavailable
    AskDigests  -> read each -> TellDigest ..., or Unavailable
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from splitinfer.errors import ProtocolError, SplitinferError
from splitinfer.store.manifest import pack
from splitinfer.store.pace import Pace
from splitinfer.store.pieces import check_of, piece_at
from splitinfer.store.source import Source
from splitinfer.wire.messages import (
    AskDigests,
    AskManifest,
    AskPieces,
    Message,
    TellDigest,
    TellManifest,
    TellPiece,
    Unavailable,
)
from transports import Frame, Link, TransportError

log = logging.getLogger(__name__)

_MAX_WAITING = 4096  # asks; an honest peer has a window of 512 pieces


class Shelf(Protocol):
    """The models that this machine lets others copy."""

    def open(self, weights: str, model: str) -> Source:
        """Open a model by its fingerprint's digest, or, if that is empty, by name. Raises ModelError."""
        ...


class Receiver(Protocol):
    """One end of a link."""

    @property
    def link(self) -> Link:
        """The link."""
        ...

    def send(self, message: Message, *parts: memoryview) -> None:
        """Send one message. Raises TransportError, ProtocolError."""
        ...

    def receive(self, item: Frame) -> Message:
        """Read one message. Raises ProtocolError."""
        ...


class Outlet:
    """Answers what is asked on ``end``. ``rate``: bytes a second that it may send now, ``None`` for any number.
    ``ended``: called when the thread ends."""

    def __init__(
        self, end: Receiver, shelf: Shelf, rate: Callable[[], float | None], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._end, self._shelf, self._rate, self._ended = end, shelf, rate, ended
        self._asks: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._source: Source | None = None
        self._pace, self._is_over = Pace(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Take an ask; from any thread, and at once."""
        if self._asks.qsize() > _MAX_WAITING:
            self._end.link.abort("it asked for more than it took")
        self._asks.put(frame)

    def close(self) -> None:
        """The link is over."""
        self._is_over.set()
        self._asks.put(None)

    def _run(self) -> None:
        try:
            while (frame := self._asks.get()) is not None and not self._is_over.is_set():
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
            if self._source is not None:
                self._source.close()
            self._ended()

    def _answer(self, message: Message) -> None:
        try:
            match message:
                case AskManifest():
                    self._tell_manifest(message)
                case AskPieces():
                    self._tell_pieces(message)
                case AskDigests():
                    self._tell_digests(message)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is no ask for weights")
        except (ProtocolError, TransportError):
            raise
        except SplitinferError as error:
            log.warning("%s cannot have weights: %s", self._end.link.address, error)
            self._end.send(Unavailable(str(error)))

    def _tell_manifest(self, ask: AskManifest) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
        self._source = self._shelf.open(ask.weights, ask.model)
        log.info("%s copies weights of %s", self._end.link.address, self._source.manifest.model)
        self._end.send(TellManifest(), memoryview(pack(self._source.manifest)))

    def _tell_pieces(self, ask: AskPieces) -> None:
        source = self._opened()
        for item, at in ask.pieces:
            piece = piece_at(source.manifest.items, item, at)
            if piece is None:
                raise ProtocolError(f"piece {at} of item {item} was asked for, and there is none")
            data = source.read(piece)
            if self._is_over.wait(self._pace.wait(time.monotonic(), piece.nbytes, self._rate())):
                return
            self._end.send(TellPiece(item, at, check_of(data)), memoryview(data))

    def _tell_digests(self, ask: AskDigests) -> None:
        source = self._opened()
        for item in ask.items:
            if not 0 <= item < len(source.manifest.items):
                raise ProtocolError(f"the digest of item {item} was asked for, and there is none")
            if self._is_over.is_set():
                return
            self._end.send(TellDigest(item, source.digest(item)))

    def _opened(self) -> Source:
        if self._source is None:
            raise ProtocolError("weights were asked for before what a model consists of")
        return self._source
