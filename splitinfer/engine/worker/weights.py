"""A worker's weights on their way: to it, while it loads, and from it to readers on its port.

What it lacks it asks the coordinator for on the control link, and other workers on links of its own. The engine's
thread loads, so what the coordinator answers meanwhile goes past the inbox, which nobody reads. What a worker has it
gives to readers, beside whatever its engine does: at a bounded pace if there was a step just now.
"""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from splitinfer.engine.links.connection import Connection, options_to
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
    """A ``Channel`` on the link to the coordinator."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.peer = f"the coordinator {connection.name} ({connection.link.address})"
        self._arrived: queue.SimpleQueue[Frame | LinkClosed] = queue.SimpleQueue()

    def takes(self, connection: Connection, item: Frame | LinkClosed) -> bool:
        """Take what arrived, if it is on this link; whether nobody else needs it. On the transport's thread."""
        if connection is not self._connection:
            return False
        self._arrived.put(item)
        return isinstance(item, Frame)

    def send(self, message: Message) -> None:
        """As ``Channel.send``."""
        self._connection.send(message)

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        """As ``Channel.receive``. Raises LinkTimeout, too: there was no answer, and the link is of no further use."""
        try:
            item = self._arrived.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise LinkTimeout(
                f"{self.peer} did not answer a request for weights within {_ANSWER_SECONDS:.0f} s"
            ) from None
        if isinstance(item, LinkClosed):
            raise item
        return self._connection.receive(item), [memoryview(part) for part in item.parts]


_CONNECT_TIMEOUT = 10.0  # seconds to reach another worker
_SERVING_SECONDS = 5.0  # after a step: another may come at any moment


class Weights:
    """``store``: where copies are kept, if there are any. ``copies``: whether weights are copied to here. ``running``:
    the model whose layers are held. ``own_key``: returns this machine's key pair, or raises PeerError where links are
    not to be encrypted.

    channel: that of the stage that is being loaded. stepped_at: when the last step was launched, in seconds."""

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
        """Where a stage gets its weights from, while it is loaded for the coordinator on ``connection``; ``None``: from
        this machine and the hub."""
        self.channel = channel = ControlChannel(connection)
        try:
            yield self._without if self._store is None else FromPeers(channel, self._store, self._reader)
        finally:
            self.channel = None

    def gather(self, data: bytes) -> bytes:
        """Tell the other rank of the stage that is being loaded ``data``, and return what both have told."""
        assert self.channel is not None
        self.channel.send(Gather(data))
        message, _ = self.channel.receive()
        if not isinstance(message, Gather):
            raise ProtocolError("the coordinator did not say what the other rank has told")
        return message.data

    def _is_serving(self) -> bool:
        return time.monotonic() - self.stepped_at < _SERVING_SECONDS

    def _reader(self, peer: Peer) -> WeightReader:
        """Return a link to another worker that may have weights."""
        return WeightReader(peer.address, options_to(peer.key, self._own_key), _CONNECT_TIMEOUT, peer.name)
