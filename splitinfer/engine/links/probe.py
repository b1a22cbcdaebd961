"""Asking and answering the questions of ``core.metrics.link_measurement`` on links that are open.

Whoever asks is an engine in the middle of a conversation, and hears all its links in one inbox. The coordinator waits
there for its answer (``WorkerGroup``); a worker answers its own coordinator later, so what comes from the next stage
meanwhile is kept apart for it (``NextStage``)."""

import queue
import random
import time
from collections.abc import Callable
from functools import cache

from splitinfer.core.metrics.link_measurement import MOST_BYTES, Exchange, LinkMeasurement, probe
from splitinfer.engine.worker.handshake import Connection
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.wire.messages import Echo, Echoed, Fault
from transports import Frame, LinkClosed

PATIENCE = 10.0  # seconds for one answer; a link that is dead ends sooner, and by itself


def measure(ask: Callable[[Exchange], float]) -> LinkMeasurement:
    """A link's figures. ``ask`` makes one exchange and gives its seconds."""
    asking = probe()
    exchange = next(asking)
    while True:
        try:
            exchange = asking.send(ask(exchange))
        except StopIteration as done:
            figures: LinkMeasurement = done.value
            return figures


@cache
def _noise() -> memoryview:
    """Bytes that no layer on the way makes fewer, and the only ones that are ever sent: echoes take no memory."""
    return memoryview(random.Random(0).randbytes(MOST_BYTES))


def payload(num_bytes: int) -> tuple[memoryview, ...]:
    """A frame's parts with so many bytes. They never change, so a frame may be sent without copying them."""
    return (_noise()[:num_bytes],) if num_bytes else ()


def reply_to(echo: Echo, frame: Frame) -> tuple[memoryview, ...]:
    """What a stage answers with.

    Raises:
        ProtocolError: the question had more bytes than one has.
    """
    if _num_bytes(frame) > MOST_BYTES or len(frame.parts) > 1:
        raise ProtocolError(f"an echo came with {_num_bytes(frame):,} bytes in {len(frame.parts)} payloads")
    return payload(echo.reply_bytes)


def check_reply(exchange: Exchange, frame: Frame) -> None:
    """Raises ProtocolError: other bytes came than were asked for."""
    if _num_bytes(frame) != exchange.back:
        raise ProtocolError(f"{exchange.back:,} bytes were to be echoed, and {_num_bytes(frame):,} came")


def _num_bytes(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame.parts)


class NextStage:
    """A worker's data link. What comes on it goes to ``deliver``, but answers to ``measure`` do not."""

    def __init__(self, connection: Connection, deliver: Callable[[Frame | LinkClosed], None]) -> None:
        self._connection, self._deliver = connection, deliver
        self._answers: queue.SimpleQueue[tuple[Frame | LinkClosed, float]] | None = None
        self.link, self.session = connection.link, connection.session
        self.link.deliver_to(self._arrived)

    def measure(self) -> LinkMeasurement:
        """How quick the link is. On the thread that sends on it.

        Raises:
            PeerError, TransportError: the next stage is gone, or does not answer.
        """
        self._answers = queue.SimpleQueue()
        try:
            return measure(self._ask)
        finally:
            self._answers = None

    def _arrived(self, item: Frame | LinkClosed) -> None:
        answers = self._answers
        if answers is None:
            self._deliver(item)
        else:
            answers.put((item, time.monotonic()))

    def _ask(self, exchange: Exchange) -> float:
        assert self._answers is not None
        asked = time.monotonic()
        self._connection.send(Echo(exchange.back), *payload(exchange.there))
        try:
            item, heard = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            raise PeerError(f"{self._connection.name} has not answered for {PATIENCE:.0f} s") from None
        if isinstance(item, LinkClosed):
            raise PeerError(f"{self._connection.name} is gone: {item.reason}")
        answer = self._connection.receive(item)
        if isinstance(answer, Fault):
            raise PeerError(f"{self._connection.name} cannot go on: {answer.reason}")
        assert isinstance(answer, Echoed)
        check_reply(exchange, item)
        return heard - asked
