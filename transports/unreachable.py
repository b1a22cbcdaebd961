"""Finds out why a connection failed: the error number of ``connect`` or of the name's resolution.

ZeroMQ hides it: no event of a socket's monitor has the number (zmq_socket_monitor(3), libzmq 4.3.5). So after the last
attempt a plain socket asks once more. A lost packet is waited for a second at most, and then counts as a time-out.
"""

from __future__ import annotations

import errno
import os
import socket as sockets
import time
from collections.abc import Sequence
from typing import NamedTuple

PROBE_SECONDS = 1.0  # for all addresses of a host together

# A machine that refuses was reached, whatever its other addresses say; one without a route may have another address.
_TELLING = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.EHOSTDOWN)


class Unreachable(NamedTuple):
    """An attempt that failed. ``host``: the numeric address, or the name that cannot be resolved. ``error``: an
    ``errno``, or if ``is_name`` is true one of getaddrinfo's numbers (``socket.EAI_NONAME`` ...); 0: a connection can
    be made, but nobody answers on it."""

    host: str
    error: int
    is_name: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether a connection can be made but nobody answers on it."""
        return self.error == 0 and not self.is_name

    @property
    def is_refused(self) -> bool:
        """Whether the machine is there but nothing listens on the port."""
        return self.error == errno.ECONNREFUSED and not self.is_name

    def __str__(self) -> str:
        if self.is_name:
            return f"cannot resolve {self.host}"
        if self.is_silent:
            return f"connected to {self.host}, but no answer"
        return f"{os.strerror(self.error)} ({self.host})"


def probe(hosts: Sequence[tuple[str, int]], seconds: float) -> Unreachable | None:
    """Connect to numeric addresses and ports, one after the other, and hang up.

    Returns:
        The first that can be reached, with the error 0, else the most telling failure. None if there are no hosts.
    """
    found: list[Unreachable] = []
    until = time.monotonic() + seconds
    for left, (host, port) in zip(range(len(hosts), 0, -1), hosts, strict=True):
        number = _connect(host, port, max(0.05, (until - time.monotonic()) / left))
        if number == 0:
            return Unreachable(host, 0)
        found.append(Unreachable(host, number))
    return min(found, key=_rank, default=None)


def _rank(attempt: Unreachable) -> int:
    return _TELLING.index(attempt.error) if attempt.error in _TELLING else len(_TELLING)


def _connect(host: str, port: int, seconds: float) -> int:
    """Return the error number of a connection attempt; 0 if it succeeded."""
    try:
        family, kind, protocol, _, address = sockets.getaddrinfo(
            host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_NUMERICHOST
        )[0]
        with sockets.socket(family, kind, protocol) as socket:
            socket.settimeout(seconds)
            socket.connect(address)
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as problem:
        return problem.errno or errno.EINVAL
    return 0
