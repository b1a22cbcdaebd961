"""The exchanges of ``core.metrics.link_measurement`` on open links: sends echoes, and replies to them.

The engine that measures receives from all its links in one inbox. The coordinator waits there for the replies
(``WorkerGroup``). A worker cannot: its inbox also holds other links' events, which come later, so the replies of the
next stage go to a queue of their own (``NextStage``).
"""

import queue
import random
import time
from collections.abc import Callable
from functools import cache

from splitinfer.core.metrics.link_measurement import MOST_BYTES, Exchange, LinkMeasurement, probe
from splitinfer.engine.links.connection import Connection
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.wire.messages import Echo, Echoed, Fault
from transports import Frame, LinkClosed

PATIENCE = 10.0  # seconds for one reply; a dead link ends sooner, and by itself


def measure(ask: Callable[[Exchange], float]) -> LinkMeasurement:
    """Measure a link. ``ask`` makes one exchange and returns its seconds."""
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
    """Random bytes, which no layer below can compress. All echoes send these, so they take no memory of their own."""
    return memoryview(random.Random(0).randbytes(MOST_BYTES))


def payload(num_bytes: int) -> tuple[memoryview, ...]:
    """The parts of a frame with ``num_bytes`` bytes. These never change, so they may be sent without a copy."""
    return (_noise()[:num_bytes],) if num_bytes else ()


def reply_to(echo: Echo, frame: Frame) -> tuple[memoryview, ...]:
    """The parts of the reply to an echo.

    Raises:
        ProtocolError: the echo carries more bytes than is allowed.
    """
    if _num_bytes(frame) > MOST_BYTES or len(frame.parts) > 1:
        raise ProtocolError(f"an echo came with {_num_bytes(frame):,} bytes in {len(frame.parts)} payloads")
    return payload(echo.reply_bytes)


def check_reply(exchange: Exchange, frame: Frame) -> None:
    """Raises ProtocolError if the reply has another number of bytes than was asked for."""
    if _num_bytes(frame) != exchange.back:
        raise ProtocolError(f"{exchange.back:,} bytes were to be echoed, and {_num_bytes(frame):,} came")


def _num_bytes(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame.parts)


class NextStage:
    """A worker's data link to the next stage. What arrives on it goes to ``deliver``, except replies to ``measure``."""

    def __init__(self, connection: Connection, deliver: Callable[[Frame | LinkClosed], None]) -> None:
        self._connection, self._deliver = connection, deliver
        self._replies: queue.SimpleQueue[tuple[Frame | LinkClosed, float]] | None = None
        self.link, self.session = connection.link, connection.session
        self.link.deliver_to(self._arrived)

    def measure(self) -> LinkMeasurement:
        """Measure the link. Call on the thread that sends on it.

        Raises:
            PeerError, TransportError: the next stage is gone, or does not answer.
        """
        self._replies = queue.SimpleQueue()
        try:
            return measure(self._ask)
        finally:
            self._replies = None

    def _arrived(self, item: Frame | LinkClosed) -> None:
        replies = self._replies
        if replies is None:
            self._deliver(item)
        else:
            replies.put((item, time.monotonic()))

    def _ask(self, exchange: Exchange) -> float:
        assert self._replies is not None
        asked = time.monotonic()
        self._connection.send(Echo(exchange.back), *payload(exchange.there))
        try:
            item, heard = self._replies.get(timeout=PATIENCE)
        except queue.Empty:
            raise PeerError(f"{self._connection.name} did not answer within {PATIENCE:.0f} s") from None
        if isinstance(item, LinkClosed):
            raise PeerError(f"{self._connection.name} is gone: {item.reason}")
        reply = self._connection.receive(item)
        if isinstance(reply, Fault):
            raise PeerError(f"{self._connection.name} cannot go on: {reply.reason}")
        assert isinstance(reply, Echoed)
        check_reply(exchange, item)
        return heard - asked
