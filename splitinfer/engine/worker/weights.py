"""A worker's weights on their way: to it, while it loads, and from it to readers on its port.

What it lacks it asks the coordinator for on the control link, and other workers on links of its own. What it has it
gives to readers, beside whatever its engine does: at a bounded pace if there was a step just now.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from splitinfer.engine.files.answering import Readers, Running, find_anywhere
from splitinfer.engine.files.reader import Reader
from splitinfer.engine.files.weight_source import FromPeers, NoCopies
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.keys import options_to
from splitinfer.engine.stage.loader import WeightSource
from splitinfer.engine.worker.control_channel import ControlChannel
from splitinfer.errors import ProtocolError
from splitinfer.store.models import ModelStore
from splitinfer.wire.messages import Gather, Peer
from transports import Frame, KeyPair, LinkClosed

_CONNECT_TIMEOUT = 10.0  # seconds to reach another worker
_SERVING_SECONDS = 5.0  # after a step: another may come at any moment


class Weights:
    """``store``: where copies are kept, if there are any. ``copies``: whether weights are copied to here. ``running``:
    the model whose layers are held. ``own_key``: returns this machine's key pair, or raises PeerError where links are
    not to be encrypted."""

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
        self._channel: ControlChannel | None = None
        self._stepped = float("-inf")  # when the last step was launched, in seconds
        self.readers = Readers(find_anywhere(running, store), self._is_serving)

    @contextmanager
    def source(self, connection: Connection) -> Iterator[WeightSource | None]:
        """Where a stage gets its weights from, while it is loaded for the coordinator on ``connection``; ``None``: from
        this machine and the hub."""
        self._channel = channel = ControlChannel(connection)
        try:
            yield self._without if self._store is None else FromPeers(channel, self._store, self._reader)
        finally:
            self._channel = None

    def gather(self, data: bytes) -> bytes:
        """Tell the other rank of the stage that is being loaded ``data``, and return what both have told."""
        assert self._channel is not None
        self._channel.send(Gather(data))
        message, _ = self._channel.receive()
        if not isinstance(message, Gather):
            raise ProtocolError("the coordinator did not say what the other rank has told")
        return message.data

    def takes(self, connection: Connection, item: Frame | LinkClosed) -> bool:
        """Take what arrived, if it answers an ask of the stage that is being loaded; whether nobody else needs it. On
        the transport's thread."""
        channel = self._channel
        return channel is not None and channel.takes(connection, item)

    def stepped(self) -> None:
        """A step was launched."""
        self._stepped = time.monotonic()

    def _is_serving(self) -> bool:
        return time.monotonic() - self._stepped < _SERVING_SECONDS

    def _reader(self, peer: Peer) -> Reader:
        """A link to another worker that may have weights."""
        return Reader(peer.address, options_to(peer.key, self._own_key), _CONNECT_TIMEOUT, peer.name)
