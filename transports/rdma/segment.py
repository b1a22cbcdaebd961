"""Memory that the engine's process and its child share, and its allocation.

The segment is unlinked as soon as it is made, and passed to the child as an open descriptor. So the system frees it
however the processes end.

It holds only the bytes of messages. Their offsets, and that they were consumed, are sent over the channel, whose system
calls also order the reads and writes of the two processes. So each byte has one writer at a time, and there is no lock:
where the engine writes, it leaves room for the heads of messages, which the child fills in.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory is made of
import mmap
import os
import secrets
from collections import deque

SEGMENT_BYTES = 16 << 20
MAX_MESSAGES = 128  # so that the channel's buffers hold a record for each


class Segment:
    """Shared bytes; `descriptor` is passed to the child."""

    def __init__(self, descriptor: int, num_bytes: int = SEGMENT_BYTES) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, num_bytes)
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
        """Free it; no other view of it may exist."""
        try:
            self.view.release()
            self._map.close()
        finally:
            os.close(self.descriptor)


class Ring:
    """The writer's allocation in a segment: messages follow each other, none wraps around the end, and they are
    consumed in order.

    |....consumed....[ oldest ][ ... ][ newest ]........free........|
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._next = 0
        self._num_used = 0
        self._spans: deque[int] = deque()  # of each message, with what was skipped before it

    def place(self, num_bytes: int) -> int | None:
        """Allocate the next message: its offset; None while there is no room."""
        is_wrapped = self._next + num_bytes > self._num_bytes
        span = num_bytes + (self._num_bytes - self._next if is_wrapped else 0)
        if self._num_used + span > self._num_bytes or len(self._spans) >= MAX_MESSAGES:
            return None
        offset = 0 if is_wrapped else self._next
        self._next = offset + num_bytes
        self._num_used += span
        self._spans.append(span)
        return offset

    def consumed(self) -> None:
        """Free the oldest message."""
        self._num_used -= self._spans.popleft()
        if not self._spans:
            self._next = 0  # all are read: begin at the front, which is in the processor's cache
