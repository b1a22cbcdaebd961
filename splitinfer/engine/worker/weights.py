"""Copies of weights to a worker while it loads, and from it to readers on its port.

A worker asks for missing weights: the coordinator on the control link, other workers on separate links. The engine's
thread loads and does not read its inbox, so the coordinator's answers bypass it. A worker gives its weights to readers
while its engine works, at a bounded rate if there was a step in the last seconds.
"""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from splitinfer.engine.links.connection import CONNECT_TIMEOUT, Connection, options_to
from splitinfer.engine.stage.loader import WeightSource
from splitinfer.engine.weights.answering import Readers, Running, find_anywhere
from splitinfer.engine.weights.copying import WeightReader
from splitinfer.engine.weights.weight_source import FromPeers, NoCopies
from splitinfer.errors import ProtocolError
from splitinfer.weights.models import ModelStore
from splitinfer.wire.messages import Gather, Message, Peer
from transports import Frame, KeyPair, LinkClosed, LinkTimeout

_ANSWER_SECONDS = 300.0  # for a range on a slow disk, while the coordinator reads its own layers


class ControlChannel:
    """A ``WeightChannel`` on the link to the coordinator."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.peer = f"the coordinator {connection.name} ({connection.link.address})"
        self._arrived: queue.SimpleQueue[Frame | LinkClosed] = queue.SimpleQueue()

    def takes(self, connection: Connection, item: Frame | LinkClosed) -> bool:
        """Take an item of this link, on the transport's thread. Return whether the inbox does not need it."""
        if connection is not self._connection:
            return False
        self._arrived.put(item)
        return isinstance(item, Frame)

    def send(self, message: Message) -> None:
        """Send a message, as ``WeightChannel.send``."""
        self._connection.send(message)

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        """Wait for the next message, as ``WeightChannel.receive``. Raises LinkTimeout if no answer arrives."""
        try:
            item = self._arrived.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise LinkTimeout(
                f"{self.peer} did not answer a request for weights within {_ANSWER_SECONDS:.0f} s"
            ) from None
        if isinstance(item, LinkClosed):
            raise item
        return self._connection.receive(item), [memoryview(part) for part in item.parts]


_SERVING_SECONDS = 5.0  # the time after a step in which another one may arrive at any moment


class Weights:
    """The weights of a worker: copies to it and from it. ``store``: where copies are kept, or None. ``copies``: whether
    the worker copies weights. ``running``: returns the model whose layers it holds. ``own_key``: returns this machine's
    key pair, or raises PeerError if links are not encrypted.

    channel: the channel of the stage that is loading. stepped_at: when the last step was launched, in seconds."""

    def __init__(
        self,
        store: ModelStore | None,
        running: Callable[[], Iterable[Running]],
        own_key: Callable[[], KeyPair],
        *,
        copies: bool,
    ) -> None:
        self._store, self._own_key = store if copies else None, own_key
        self._without = NoCopies() if copies else None
        self.channel: ControlChannel | None = None
        self.stepped_at = float("-inf")
        self.readers = Readers(find_anywhere(running, store), self._is_serving)

    @contextmanager
    def source(self, connection: Connection) -> Iterator[WeightSource | None]:
        """Give the source of a stage's weights while the block loads it for the coordinator on ``connection``; None:
        this machine and the hub."""
        self.channel = channel = ControlChannel(connection)
        try:
            yield self._without if self._store is None else FromPeers(channel, self._store, self._reader)
        finally:
            self.channel = None

    def gather(self, data: bytes) -> bytes:
        """Send ``data`` to the other rank of the stage that is loading, and return the data of both ranks."""
        assert self.channel is not None
        self.channel.send(Gather(data))
        message, _ = self.channel.receive()
        if not isinstance(message, Gather):
            raise ProtocolError("the coordinator did not say what the other rank has told")
        return message.data

    def _is_serving(self) -> bool:
        return time.monotonic() - self.stepped_at < _SERVING_SECONDS

    def _reader(self, peer: Peer) -> WeightReader:
        """Open a link to another worker that may have weights."""
        return WeightReader(peer.address, options_to(peer.key, self._own_key), CONNECT_TIMEOUT, peer.name)
