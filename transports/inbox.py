"""Queues the frames that have arrived on a link, and then its end; read by `get` or emptied into a sink.

One thread fills it, another reads. `end` may be called from any thread, and only the first call counts. A sink is
called by the thread that calls `pump`, never by two at a time and never with the lock held; so a sink may send on its
own link.
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
        self._changed = threading.Condition(threading.Lock())
        self._ended: str | None = None
        self._sink: Sink | None = None
        self._is_pumping = False
        self._has_delivered_end = False

    @property
    def ended(self) -> LinkClosed | None:
        reason = self._ended
        return None if reason is None else LinkClosed(reason)

    @property
    def is_readable(self) -> bool:
        """Whether `get` would return, or raise, without waiting."""
        return bool(self._frames) or self._ended is not None or self._sink is not None

    def put(self, frame: Frame, num_bytes: int) -> bool:
        """Add a frame. False if there is no room for it; after the end frames are dropped."""
        with self._changed:
            if self._ended is not None:
                return True
            if self._frames and self._num_bytes + num_bytes > self._max_bytes:
                return False
            self._frames.append((frame, num_bytes))
            self._num_bytes += num_bytes
            self._changed.notify()
            return True

    def end(self, reason: str, *, drop: bool = False) -> bool:
        """End the queue with `reason`, after the frames in it or, with `drop`, without them. False if it had ended."""
        with self._changed:
            if drop:
                self._frames.clear()
            is_first = self._ended is None
            if is_first:
                self._ended = reason
            self._changed.notify_all()
            return is_first

    def get(self, timeout: float | None) -> Frame | None:
        """The next frame, or None when none came in `timeout` seconds. Raises LinkClosed after the last one."""
        with self._changed:
            if self._sink is not None:
                raise TransportError("this link delivers to a sink; recv() is not available")
            if self._frames:
                return self._pop()
            self._changed.wait_for(lambda: self._frames or self._ended is not None, timeout)
            if self._frames:
                return self._pop()
            if self._ended is not None:
                raise LinkClosed(self._ended)
            return None

    def attach(self, sink: Sink) -> None:
        """From now on `pump` passes everything to `sink`. Raises TransportError if there is a sink already."""
        with self._changed:
            if self._sink is not None:
                raise TransportError("this link delivers to a sink already")
            self._sink = sink

    def pump(self) -> None:
        """Empty the queue into the sink, if there is one. Returns at once if another thread is doing so."""
        with self._changed:
            sink = self._sink
            if sink is None or self._is_pumping:
                return
            self._is_pumping = True
        while (item := self._next_for_sink()) is not None:
            sink(item)

    def _next_for_sink(self) -> Frame | LinkClosed | None:
        with self._changed:
            if self._frames:
                return self._pop()
            if self._ended is not None and not self._has_delivered_end:
                self._has_delivered_end = True
                return LinkClosed(self._ended)
            self._is_pumping = False
            return None

    def _pop(self) -> Frame:
        frame, num_bytes = self._frames.popleft()
        self._num_bytes -= num_bytes
        return frame
