"""Frames between two processes, over a socket whose end neither of them is told of.

A frame is `kind u8 | num_bytes u32`, then its bytes. The socket's buffers and its flow control stand for those of the
hardware.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import struct
import time
from typing import Any, NoReturn

SMALLEST, LARGEST = 4 << 10, 512 << 10  # bytes of a frame; both a power of two
_SINCE_LARGER = (26, 3)
_HEAD = struct.Struct("<BI")
DATA, SUM = 1, 2


def frame_bytes(num_bytes: int, macos: str) -> int:
    """The size of the frames that a message of `num_bytes` is sent in."""
    version = tuple(int(number) for number in macos.split(".")[:2])
    size = SMALLEST
    while version >= _SINCE_LARGER and size < min(num_bytes, LARGEST):
        size *= 2
    return size


def hang() -> NoReturn:
    """An operation that never ends; it ignores everything but signals that end the process."""
    while True:
        time.sleep(60.0)


class Wire:
    def __init__(self, socket: sockets.socket) -> None:
        self._socket = socket
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        self._kept: dict[int, bytearray] = {}  # of each size, the receive buffer, which keeps what it was filled with

    def send(self, kind: int, frame: Any) -> None:
        """Send one frame; to a peer that is gone it succeeds."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_HEAD.pack(kind, len(frame)))
            self._socket.sendall(frame)

    def recv(self, kind: int, size: int) -> bytearray:
        """The buffer of `size` bytes after the next frame has come; valid until the next call. Waits for ever."""
        buffer = self.kept(size)
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

    def kept(self, size: int) -> bytearray:
        return self._kept.setdefault(size, bytearray(size))

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
