"""Messages between two processes, over a socket whose end neither of them is told of.

A message is `kind u8 | num_bytes u32`, then its bytes. The socket's buffers and its flow control stand for those of the
hardware.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import struct
import time
from typing import NoReturn

_HEAD = struct.Struct("<BI")
DATA, SUM = 1, 2


def hang() -> NoReturn:
    """An operation that never ends; it ignores everything but signals that end the process."""
    while True:
        time.sleep(60.0)


class Wire:
    def __init__(self, socket: sockets.socket) -> None:
        self._socket = socket
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)

    def send(self, kind: int, message: bytes | bytearray | memoryview) -> None:
        """Send a message; to a peer that is gone it succeeds."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_HEAD.pack(kind, len(message)))
            self._socket.sendall(message)

    def recv(self, kind: int, size: int) -> bytearray:
        """The next message of a kind, cut or filled with zeros to `size` bytes. Waits for ever."""
        buffer = bytearray(size)
        head = bytearray(_HEAD.size)
        while True:
            self._read(memoryview(head))
            its_kind, num_bytes = _HEAD.unpack(head)
            fitting = min(num_bytes, size)
            if its_kind == kind:
                self._read(memoryview(buffer)[:fitting])
                self._read(memoryview(bytearray(num_bytes - fitting)))
                return buffer
            self._read(memoryview(bytearray(num_bytes)))  # of an operation that nobody waits for

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(sockets.SHUT_RDWR)
        self._socket.close()

    def _read(self, room: memoryview) -> None:
        while room.nbytes:
            try:
                num_read = self._socket.recv_into(room)
            except OSError:
                num_read = 0
            if num_read == 0:
                hang()
            room = room[num_read:]
