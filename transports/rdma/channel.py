"""The messages between an engine's process and its child, over a pair of sockets.

    engine -> child    JOB the child's role · GATHERED the data of both
                       SEND the chunk in the segment, `size` bytes of content · CONSUMED the oldest chunk
                       WAKE from a rest
    child -> engine    GATHER this data · READY · FAILED why · ROUSE the peer's child
                       GOT a chunk in the segment · CONSUMED the oldest chunk

A record is `kind u8 | length of the text u32 | offset u64 | size u64`, then the text. Both ends run from one
installation on one machine.

The shared segment holds only the bytes of messages. Records say where the bytes lie and when they were consumed, and
their system calls order the reads and writes of the two processes. So each byte has one writer at a time and no lock is
needed: when the engine writes, it leaves room for the heads of messages, which the child fills in. The segment is
unlinked as soon as it exists, so the system frees it however the processes end.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # multiprocessing.shared_memory is built on it
import mmap
import os
import secrets
import select
import socket as sockets
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from transports.rdma.messages import CHUNK_MESSAGES, MESSAGE_BYTES

LEAVE_SECONDS = 3.0  # for a child to leave its group at the end; it may have to wait for the last message of its peer

_RECORD = struct.Struct("<BIQQ")
_BUFFER_BYTES = 256 << 10  # more than unread records ever take (`segment.NUM_SLOTS`), so no write waits
_READ_BYTES = 64 << 10


class ChannelWord(IntEnum):
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


class ChannelRecord(NamedTuple):
    """One message: `offset` and `size` of bytes in the segment, or a `text`."""

    word: ChannelWord
    offset: int = 0
    size: int = 0
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Job:
    """A child's role and times.

    `rest_seconds`: the time without a frame after which the reader rests. `device`: its RDMA device, for JACCL. `host`:
    the peer's IPv4 address, for ring.
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

    def send(self, word: ChannelWord, offset: int = 0, size: int = 0, text: bytes = b"") -> None:
        """Send one record. Raises ChannelClosedError."""
        data = _RECORD.pack(word, len(text), offset, size) + text
        try:
            with self._sending:
                if self.socket.send(data) != len(data):
                    raise ChannelClosedError("it does not read")
        except OSError as problem:  # BlockingIOError, too: the other end has not read for very long
            raise ChannelClosedError(str(problem)) from None

    def recv(self, timeout: float | None = None) -> ChannelRecord | None:
        """Return the next record, or None after `timeout` seconds without one. Raises ChannelClosedError."""
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

    def _take(self) -> ChannelRecord | None:
        if len(self._read) < _RECORD.size:
            return None
        word, num_text, offset, size = _RECORD.unpack_from(self._read)
        end = _RECORD.size + num_text
        if len(self._read) < end:
            return None
        text, self._read = self._read[_RECORD.size : end], self._read[end:]
        return ChannelRecord(ChannelWord(word), offset, size, text)


SLOT_BYTES = CHUNK_MESSAGES * MESSAGE_BYTES
NUM_SLOTS = 32
SEGMENT_BYTES = NUM_SLOTS * SLOT_BYTES


class Segment:
    """Shared bytes; `descriptor` is passed to the child."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SEGMENT_BYTES)
        self.view = memoryview(self._map)

    @classmethod
    def make(cls) -> Segment:
        name = f"/splitinfer-{secrets.token_hex(8)}"  # macOS allows 30 characters
        descriptor = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        try:
            _posixshmem.shm_unlink(name)
            os.ftruncate(descriptor, SEGMENT_BYTES)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Free the segment; no other view of it may exist."""
        try:
            self.view.release()
            self._map.close()
        finally:
            os.close(self.descriptor)


class Slots:
    """The writer's allocation in a segment: a slot for each chunk, taken and consumed in order."""

    def __init__(self) -> None:
        self._first = self._num_used = 0

    def take(self) -> int | None:
        """Return the offset of the next slot; None while all are in use."""
        if self._num_used == NUM_SLOTS:
            return None
        self._num_used += 1
        return (self._first + self._num_used - 1) % NUM_SLOTS * SLOT_BYTES

    def consumed(self) -> None:
        """Free the oldest slot."""
        self._num_used -= 1
        # When all chunks are read, begin at the front again: it is in the processor's cache.
        self._first = self._first + 1 if self._num_used else 0
