"""What has arrived on a link and was not yet taken: a queue that ends, read by `get` or emptied into a sink.

Filled by one thread, read by another. `end` may come from any thread and counts once. A sink is called by whoever
calls `pump`, never by two threads at a time and never with the lock held; so a sink may send on its own link.
"""

from __future__ import annotations

import threading
from collections import deque

from transports.base import Frame, LinkClosed, Sink, TransportError


class Inbox:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[tuple[Frame, int]] = deque()
        self._num_bytes = 0
        self._news = threading.Condition(threading.Lock())
        self._ended: str | None = None
        self._sink: Sink | None = None
        self._is_pumping = False
        self._has_told_end = False

    @property
    def ended(self) -> LinkClosed | None:
        reason = self._ended
        return None if reason is None else LinkClosed(reason)

    @property
    def has_news(self) -> bool:
        """Whether `get` would return, or raise, at once."""
        return bool(self._frames) or self._ended is not None or self._sink is not None

    def put(self, frame: Frame, num_bytes: int) -> bool:
        """Add a frame. False if too much is waiting already; after the end frames are dropped."""
        with self._news:
            if self._ended is not None:
                return True
            if self._frames and self._num_bytes + num_bytes > self._max_bytes:
                return False
            self._frames.append((frame, num_bytes))
            self._num_bytes += num_bytes
            self._news.notify()
            return True

    def end(self, reason: str, *, drop: bool = False) -> bool:
        """Let `reason` follow the last frame; with `drop`, at once. False if the end was known already."""
        with self._news:
            if drop:
                self._frames.clear()
            is_first = self._ended is None
            if is_first:
                self._ended = reason
            self._news.notify_all()
            return is_first

    def get(self, timeout: float | None) -> Frame | None:
        """The next frame, or None when none came in `timeout` seconds. Raises LinkClosed after the last one."""
        with self._news:
            if self._sink is not None:
                raise TransportError("this link delivers to a sink; recv() is not available")
            if self._frames:
                return self._pop()
            self._news.wait_for(lambda: self._frames or self._ended is not None, timeout)
            if self._frames:
                return self._pop()
            if self._ended is not None:
                raise LinkClosed(self._ended)
            return None

    def attach(self, sink: Sink) -> None:
        """From now on `pump` gives everything to `sink`. Raises TransportError if there is a sink already."""
        with self._news:
            if self._sink is not None:
                raise TransportError("this link delivers to a sink already")
            self._sink = sink

    def pump(self) -> None:
        """Empty the queue into the sink, if there is one. Returns at once when another thread is at it."""
        with self._news:
            sink = self._sink
            if sink is None or self._is_pumping:
                return
            self._is_pumping = True
        while (item := self._next_for_sink()) is not None:
            sink(item)

    def _next_for_sink(self) -> Frame | LinkClosed | None:
        with self._news:
            if self._frames:
                return self._pop()
            if self._ended is not None and not self._has_told_end:
                self._has_told_end = True
                return LinkClosed(self._ended)
            self._is_pumping = False
            return None

    def _pop(self) -> Frame:
        frame, num_bytes = self._frames.popleft()
        self._num_bytes -= num_bytes
        return frame
