"""The control link as the channel on which a worker asks its coordinator for weights, while it loads.

The engine's thread loads, so what the coordinator answers meanwhile goes past the inbox, which nobody reads. Heartbeats
tell of a coordinator that froze; one that lives and does not answer is given up after a bound, because the engine's
thread serves nobody else meanwhile.
"""

import queue
from collections.abc import Sequence

from splitinfer.engine.links.connection import Connection
from splitinfer.wire.messages import Message
from transports import Frame, LinkClosed, LinkTimeout

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
