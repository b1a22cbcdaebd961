"""Memory that the engine's process and its child share, and its allocation.

The segment is unlinked as soon as it is made, and passed to the child as an open descriptor. So the system frees it
however the processes end.

It holds only the bytes of messages. Where they lie, and that they were consumed, is sent over the channel, whose system
calls also order the reads and writes of the two processes. So each byte has one writer at a time, and there is no lock:
where the engine writes, it leaves room for the heads of messages, which the child fills in.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory is made of
import mmap
import os
import secrets

from transports.rdma.messages import CHUNK_MESSAGES, MESSAGE_BYTES

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
        """Free it; no other view of it may exist."""
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
        """The offset of the next slot; None while all are in use."""
        if self._num_used == NUM_SLOTS:
            return None
        self._num_used += 1
        return (self._first + self._num_used - 1) % NUM_SLOTS * SLOT_BYTES

    def consumed(self) -> None:
        """Free the oldest slot."""
        self._num_used -= 1
        # When all are read: begin at the front, which is in the processor's cache.
        self._first = self._first + 1 if self._num_used else 0
