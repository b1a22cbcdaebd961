"""The messages between an engine's process and its child, over a pair of sockets.

    engine -> child    JOB the child's role · GATHERED the data of both
                       SEND the chunk that lies in the segment, `size` bytes of content · CONSUMED the oldest chunk
                       WAKE from a rest
    child -> engine    GATHER this data · READY · FAILED why · ROUSE the peer's child
                       GOT a chunk, which lies in the segment · CONSUMED the oldest chunk

A record is `kind u8 | length of the text u32 | offset u64 | size u64`, then the text. Both ends are of one installation
and one machine.
"""

from __future__ import annotations

import select
import socket as sockets
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

LEAVE_SECONDS = 3.0  # for a child to leave its group at the end, which may take the last message of its peer's child

_RECORD = struct.Struct("<BIQQ")
_BUFFER_BYTES = 256 << 10  # more than unread records ever take (`segment.NUM_SLOTS`), so no write waits
_READ_BYTES = 64 << 10


class Word(IntEnum):
    JOB = 1
    GATHERED = 2
    SEND = 3
    WAKE = 4
    CONSUMED = 5
    GATHER = 6
    READY = 7
    FAILED = 8
    GOT = 9
    ROUSE = 10


class Record(NamedTuple):
    """One message: `offset` and `size` of bytes in the segment, or a `text`."""

    word: Word
    offset: int = 0
    size: int = 0
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Job:
    """A child's role and times.

    `rest_seconds`: without a frame until the reader rests. `device`: its RDMA device, for JACCL. `host`: the peer's
    IPv4 address, for ring.
    """

    rank: int
    backend: str
    nonce: int
    join_seconds: int
    rest_seconds: float
    device: str = ""
    host: str = ""


class ChannelClosedError(Exception):
    """The other end is gone, or does not read."""


class Channel:
    """One end. One thread receives; any may send."""

    def __init__(self, socket: sockets.socket) -> None:
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, _BUFFER_BYTES)
        socket.setblocking(False)
        self.socket = socket
        self._sending = threading.Lock()
        self._read = b""
        self._poll = select.poll()  # not select(): a server has descriptors beyond 1023
        self._poll.register(socket, select.POLLIN)

    def send(self, word: Word, offset: int = 0, size: int = 0, text: bytes = b"") -> None:
        """Raises ChannelClosedError."""
        data = _RECORD.pack(word, len(text), offset, size) + text
        try:
            with self._sending:
                if self.socket.send(data) != len(data):
                    raise ChannelClosedError("it does not read")
        except OSError as problem:  # BlockingIOError, too: the other end has not read for very long
            raise ChannelClosedError(str(problem)) from None

    def recv(self, timeout: float | None = None) -> Record | None:
        """The next record; None when none came in `timeout` seconds. Raises ChannelClosedError."""
        while (record := self._take()) is None:
            if not self._poll.poll(None if timeout is None else timeout * 1000):
                return None
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as problem:
                raise ChannelClosedError(str(problem)) from None
            if not data:
                raise ChannelClosedError("it has ended")
            self._read += data
        return record

    def _take(self) -> Record | None:
        if len(self._read) < _RECORD.size:
            return None
        word, num_text, offset, size = _RECORD.unpack_from(self._read)
        end = _RECORD.size + num_text
        if len(self._read) < end:
            return None
        text, self._read = self._read[_RECORD.size : end], self._read[end:]
        return Record(Word(word), offset, size, text)
