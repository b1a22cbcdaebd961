"""A cable that can be pulled: a TCP port that passes everything on to another, until it is told not to.

whole     bytes go both ways
torn      all connections end at once, and new ones end as soon as they come: the other machine says no
silent    nothing ends and nothing passes, as when the plug is out; what was under way comes late, when it is mended
"""

import socket
import threading
from contextlib import suppress

_PIECE = 1 << 16


class Cable:
    """From a free port of the loopback interface to ``to_port``, which may change hands meanwhile."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._passes = threading.Event()
        self._passes.set()
        self._lock = threading.Lock()
        self._is_torn = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept_all, name="cable", daemon=True).start()

    # -- what is done to it ----------------------------------------------------------------------

    def tear(self) -> None:
        """End every connection, and those that come."""
        with self._lock:
            self._is_torn = True
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _end(*pair)

    def snap(self) -> None:
        """End one connection."""
        with self._lock:
            pairs = self._pairs[-1:]
        for pair in pairs:
            _end(*pair)

    def silence(self) -> None:
        """Let nothing through, and let nobody know."""
        self._passes.clear()

    def mend(self) -> None:
        """As new."""
        with self._lock:
            self._is_torn = False
        self._passes.set()

    def close(self) -> None:
        """For good."""
        _end(self._door)
        self.tear()
        self._passes.set()

    # -- what goes through -----------------------------------------------------------------------

    def leads_to(self, _near: socket.socket) -> int:
        """The port that a connection is passed on to."""
        return self._to_port

    def _accept_all(self) -> None:
        while True:
            try:
                near = self._door.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), name="cable", daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._passes.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self.leads_to(near)), timeout=5)
        except OSError:
            _end(near)
            return
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if not self._is_torn:
                self._pairs.append((near, far))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), name="cable", daemon=True).start()
                return
        _end(near, far)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(_PIECE):
                self._passes.wait()
                other.sendall(data)
        self._passes.wait()  # an end does not get through either
        with self._lock:
            self._pairs = [pair for pair in self._pairs if one not in pair]
        _end(one, other)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
