"""One direction of a link: a queue, a thread, and the time at which each frame is due.

As on a real wire frames queue behind each other: a frame is on it for bytes / bytes_per_second after its predecessor
has left, and is due `latency` plus a random part of `jitter` later, never before its predecessor and never early.

    left(i)    = max(posted(i), left(i-1)) + bytes(i) / bytes_per_second
    arrived(i) = max(arrived(i-1), left(i) + latency + uniform(0, jitter))

The thread sleeps until then and delivers the frame; so it is late by the time the machine takes to wake a thread.
Nothing spins.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from tests.emulation.links.profile import LinkProfile
from transports import threads
from transports.base import Frame, LinkClosed

_PR_SET_TIMERSLACK = 29

Item = Frame | LinkClosed


class Timing:
    """When items that are posted one after the other arrive, by a profile. Pure: the caller says what time it is."""

    def __init__(self, profile: LinkProfile) -> None:
        self._profile, self._rng = profile, random.Random(profile.seed)
        self._free_at = 0.0  # when the last byte posted so far has left
        self._arrived_at = 0.0  # when the item posted last arrives

    def arrival(self, now: float, num_bytes: int) -> float:
        """When an item of ``num_bytes`` that is posted at ``now`` arrives, both in seconds."""
        self._free_at = max(now, self._free_at) + num_bytes * self._profile.seconds_per_byte
        jitter = self._rng.uniform(0, self._profile.jitter) if self._profile.jitter else 0.0
        self._arrived_at = max(self._arrived_at, self._free_at + self._profile.latency + jitter)
        return self._arrived_at


class Wire:
    """Passes each item to `deliver`, on a thread of its own, when it is due.

    The thread ends after `stop`, or after the last item (`post_last`).
    """

    def __init__(self, profile: LinkProfile, deliver: Callable[[Item], None], *, name: str) -> None:
        self._timing = Timing(profile)
        self._deliver = deliver
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the thread
        self._has_room = threading.Condition(self._lock)  # for callers of `wait_for_room`
        self._queue: deque[tuple[float, Item, int]] = deque()
        self._num_bytes = 0
        self._takes_more = True
        self._is_stopped = False
        self._thread = threads.make(self._run, f"transports emulated {name}")
        self._thread.start()

    def post(self, item: Item, num_bytes: int) -> bool:
        """Queue an item, however many there are. False, and nothing happens, after `post_last` or `stop`."""
        with self._lock:
            if self._takes_more:
                self._append(item, num_bytes)
            return self._takes_more

    def post_last(self, item: Item) -> None:
        """Queue the last item, after which the wire ends: no more are taken, and waits for room return."""
        with self._lock:
            if self._takes_more:
                self._append(item, 0)
                self._takes_more = False
                self._has_room.notify_all()

    def wait_for_room(self, num_frames: int, patience: float) -> bool:
        """Wait until fewer than `num_frames` are queued, or no more are taken.

        False if the first is overdue by `patience` seconds: a slow wire is waited for, but not one that cannot deliver.
        """
        with self._lock:
            while self._takes_more and len(self._queue) >= num_frames:
                left = self._queue[0][0] + patience - time.monotonic()
                if left <= 0:
                    return False
                self._has_room.wait(left)
            return True

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self._num_bytes

    @property
    def takes_more(self) -> bool:
        return self._takes_more

    def stop(self) -> None:
        """Drop everything, end the thread; from any thread."""
        with self._lock:
            self._takes_more = False
            self._is_stopped = True
            self._queue.clear()
            self._num_bytes = 0
            self._changed.notify()
            self._has_room.notify_all()

    def join(self, timeout: float) -> None:
        if not self.is_mine:
            self._thread.join(timeout)

    @property
    def is_mine(self) -> bool:
        """Whether the caller is the wire's thread."""
        return threading.current_thread() is self._thread

    def _append(self, item: Item, num_bytes: int) -> None:
        self._queue.append((self._timing.arrival(time.monotonic(), num_bytes), item, num_bytes))
        self._num_bytes += num_bytes
        if len(self._queue) == 1:  # otherwise the thread waits for an earlier one
            self._changed.notify()

    def _run(self) -> None:
        _wake_on_time()
        while (item := self._next()) is not None:
            self._deliver(item)

    def _next(self) -> Item | None:
        with self._lock:
            while not self._is_stopped:
                wait = None
                if self._queue:
                    wait = self._queue[0][0] - time.monotonic()
                    if wait <= 0:
                        return self._pop()
                elif not self._takes_more:
                    return None
                self._changed.wait(wait)
            return None

    def _pop(self) -> Item:
        _, item, num_bytes = self._queue.popleft()
        self._num_bytes -= num_bytes
        self._has_room.notify()
        return item


def _wake_on_time() -> None:
    """Linux lets a sleeping thread oversleep by 50 us to save power; ask for 1 ns, for this thread only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
