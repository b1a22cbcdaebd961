"""Memory that the engine's process and its child share, and who may write where in it.

The segment has no name by the time anybody could lose it: it is made, unlinked at once, and handed to the child as an
open descriptor. Whatever dies, the system takes it back.

It holds bytes and nothing else. Where a message lies and that it was consumed is told over the channel, whose system
calls also put the reads and writes of two processors into order. So there is one writer of each byte, and no lock.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory is made of
import mmap
import os
import secrets
from collections import deque

SEGMENT_BYTES = 16 << 20
MAX_MESSAGES = 128  # so that the channel's buffers hold a word about each


class Segment:
    """Shared bytes; `descriptor` is for the child."""

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
        """Give it back; nobody may hold a view of it."""
        try:
            self.view.release()
            self._map.close()
        finally:
            os.close(self.descriptor)


class Ring:
    """The writer's book-keeping of a segment: messages lie behind each other, none wraps around the end, and they are
    consumed in order.

    |....consumed....[ oldest ][ ... ][ newest ]........free........|
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._next = 0
        self._num_used = 0
        self._spans: deque[int] = deque()  # of each message, with what was skipped before it

    def place(self, num_bytes: int) -> int | None:
        """Where the next message goes; None while there is no room."""
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
        """The oldest message is."""
        self._num_used -= self._spans.popleft()
        if not self._spans:
            self._next = 0  # nobody reads: begin at the front, where the memory is warm
