"""The socket that connections come from, which bounds how many there are.

A connection over TLS is known to the server only after its handshake (asyncio calls ``connection_made`` then), and
until then to nobody: whoever connects and is silent would take open files without end. So connections are counted where
they are accepted, until they are closed.
"""

import socket
from typing import Any
from weakref import WeakSet


class Listening(socket.socket):
    """Takes over the socket ``bound``. Where ``most`` connections are open, further ones are closed as they come."""

    def __init__(self, bound: socket.socket, most: int) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._most = most
        self._open = WeakSet[_Accepted]()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            BlockingIOError: there is none, or one too many, after which asyncio lets others run before it looks again.
        """
        accepted, address = super().accept()
        made = _Accepted(accepted, self._open)
        if len(self._open) > self._most:
            made.close()
            raise BlockingIOError
        return made, address


class _Accepted(socket.socket):
    """A connection, counted among ``others`` until it is closed."""

    def __init__(self, accepted: socket.socket, others: "WeakSet[_Accepted]") -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._others = others
        others.add(self)

    def close(self) -> None:
        super().close()
        self._others.discard(self)
