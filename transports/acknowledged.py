"""Asks this machine's kernel whether the machine at the other end of a TCP connection still acknowledges packets.

A process that is frozen, swaps or holds its interpreter's lock sends no heartbeats, but its machine's kernel goes on
acknowledging ours. If the machine is asleep, off, or its cable is out, nothing is acknowledged.

    Linux    TCP_INFO: the packets and window probes without an acknowledgement, and the age of the last one
    macOS    TCP_CONNECTION_INFO (XNU's netinet/tcp.h): the bytes that wait in the send buffer, and the peer's window.
             Written from the header; it has not been run on a Mac.
    others   unknown
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
import sys
from collections.abc import Iterator

_LINUX = struct.Struct("=3xB20xI28xI")  # tcpi_probes, tcpi_unacked, tcpi_last_ack_recv
_MACOS_OPTION = 0x106  # TCP_CONNECTION_INFO
_MACOS = struct.Struct("=28xII")  # tcpi_snd_wnd, tcpi_snd_sbbytes; not asked for what follows


@contextlib.contextmanager
def duplicate(descriptor: int) -> Iterator[sockets.socket]:
    """Yield a duplicate of the connection that a descriptor stands for now. Raises OSError if it is not a connection.

    By the time that zmq reports a descriptor, its number may belong to a file. A duplicate of a file must be closed at
    once: it would keep the file's lock after its owner has closed the file.
    """
    copy = os.dup(descriptor)
    try:
        connection = sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def machine_answers(connection: sockets.socket, seconds: float) -> bool | None:
    """Return whether the other machine has acknowledged all packets, or some in the last ``seconds``. Return None if
    the kernel does not tell. Raises OSError if the connection is gone."""
    if sys.platform == "linux":
        return _on_linux(connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _LINUX.size), seconds)
    if sys.platform == "darwin":
        return _on_macos(connection.getsockopt(sockets.IPPROTO_TCP, _MACOS_OPTION, 256))
    return None


def _on_linux(told: bytes, seconds: float) -> bool | None:
    """Read a ``struct tcp_info``."""
    if len(told) < _LINUX.size:
        return None
    probes, unacknowledged, milliseconds = _LINUX.unpack_from(told)
    # Probes of a full window come up to 6 s apart; one that was just sent may still be answered.
    return not (unacknowledged or probes > 1) or milliseconds < 1000 * seconds


def _on_macos(told: bytes) -> bool | None:
    """Read a ``struct tcp_connection_info``. Heartbeats are acknowledged long before the next one is sent, unless the
    peer's window is full."""
    if len(told) < _MACOS.size:
        return None
    window, waiting = _MACOS.unpack_from(told)
    return not waiting or not window
