"""Queues the frames that have arrived on a link, and then its end. `get` reads them, or `pump` passes them to a sink.

One thread fills it, another reads. `end` may be called from any thread, and only the first call counts. A sink is
called by the thread that calls `pump`, never by two at a time and never with the lock held; so a sink may send on its
own link. A sink that raises ends its own link: it receives that end like any other, and the calling thread goes on.

Links on top of another link (`emulated`, `rdma`) share `InboxLink`, which implements reading and the end for a sender.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from transports.base import (
    Frame,
    Link,
    LinkClosed,
    LinkOptions,
    LinkTimeout,
    Listener,
    ListenerClosed,
    Sink,
    TransportError,
)

log = logging.getLogger("transports")


class Inbox:
    """The queue of one link.

    Args:
        address: the peer's, for messages.
        max_bytes: the most that may wait unread.
        fail: ends the link with a reason, because a sink has raised or more than `max_bytes` wait.
    """

    def __init__(self, address: str, max_bytes: int, fail: Callable[[str], None]) -> None:
        self._address, self._max_bytes, self._fail = address, max_bytes, fail
        self._frames: deque[tuple[Frame, int]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for who waits in ``get``
        self._ended: str | None = None
        self._sink: Sink | None = None
        self._is_pumping = False
        self._has_delivered_end = False

    @property
    def ended(self) -> LinkClosed | None:
        reason = self._ended
        return None if reason is None else LinkClosed(reason)

    def deliver(self, frame: Frame) -> None:
        """Add a frame and empty the queue into the sink; end the link if there is no room. After the end, drop the
        frame."""
        num_bytes = frame.num_bytes
        with self._lock:
            if self._ended is not None:
                return
            is_full = bool(self._frames) and self._num_bytes + num_bytes > self._max_bytes
            if not is_full:
                self._frames.append((frame, num_bytes))
                self._num_bytes += num_bytes
                if self._sink is None:
                    self._changed.notify()
        if is_full:
            self._fail(f"more than {self._max_bytes} bytes from {self._address} wait unread")
        else:
            self.pump()

    def end(self, reason: str, *, drop: bool = False) -> None:
        """End the queue with `reason`, unless it has ended already; `drop` discards its frames first."""
        with self._changed:
            if drop:
                self._frames.clear()
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def get(self, timeout: float | None) -> Frame:
        """Return the next frame. Raises LinkTimeout if no frame came in `timeout` seconds, LinkClosed after the last
        one."""
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
            raise LinkTimeout(f"nothing from {self._address} within {timeout:g} s")

    def attach(self, sink: Sink) -> None:
        """Let `pump` pass everything to `sink` from now on. Raises TransportError if there is a sink already."""
        with self._lock:
            if self._sink is not None:
                raise TransportError("this link delivers to a sink already")
            self._sink = sink

    def pump(self) -> None:
        """Pass the queue to the sink, if there is one. Return at once if another thread is doing so."""
        with self._lock:
            sink = self._sink
            if sink is None or self._is_pumping:
                return
            self._is_pumping = True
        failed: str | None = None
        while (item := self._next_for_sink()) is not None:
            try:
                sink(item)
            except Exception as error:
                log.exception("the reader of a link failed")
                failed = f"the reader of the link failed ({type(error).__name__}: {error})"
                self.end(failed, drop=True)
        if failed is not None:
            self._fail(failed)

    def _next_for_sink(self) -> Frame | LinkClosed | None:
        with self._lock:
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


class QueuedLink(Link):
    """A link whose received frames wait in `inbox`, and which keeps the `progress` to send."""

    def __init__(self, address: str, options: LinkOptions) -> None:
        self.address = address
        self.inbox = Inbox(address, options.max_waiting_bytes, lambda reason: self._fail(reason))
        self.progress = 0
        self._options = options

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """End a link that broke the contract, and send the peer the reason if possible."""

    def recv(self, timeout: float | None = None) -> Frame:
        return self.inbox.get(timeout)

    def deliver_to(self, sink: Sink) -> None:
        self.inbox.attach(sink)
        self.inbox.pump()

    def set_progress(self, progress: int) -> None:
        if not 0 <= progress < 1 << 64:
            raise ValueError(f"progress must be in [0, 2**64), not {progress}")
        self.progress = progress

    @property
    def closed(self) -> LinkClosed | None:
        return self.inbox.ended


class InboxLink(QueuedLink):
    """A link on top of another, `below`, whose heartbeats it shares.

    Its sink may close it, so a method that would wait for the sink to return checks `_sink_thread` first.
    """

    def __init__(self, address: str, below: Link, options: LinkOptions) -> None:
        super().__init__(address, options)
        self._below = below
        self._over = threading.Event()
        self._state = threading.Lock()  # never held while anything else is called
        self._close_reason: str | None = None  # why close() was called
        self._sink_thread: int | None = None

    def _take(self, frame: Frame) -> None:
        if self._close_reason is None:  # frames that arrive after close() are dropped
            self.inbox.deliver(frame)

    def deliver_to(self, sink: Sink) -> None:
        def guarded(item: Frame | LinkClosed) -> None:
            self._sink_thread = threading.get_ident()
            try:
                sink(item)
            finally:
                self._sink_thread = None

        super().deliver_to(guarded)

    @property
    def _ended(self) -> LinkClosed | None:
        """The reason why frames can no longer be sent; None while they can."""
        if self._close_reason is not None and self.inbox.ended is None:
            return LinkClosed(self._close_reason)
        return self.inbox.ended

    def set_progress(self, progress: int) -> None:
        self._below.set_progress(progress)

    @property
    def peer_progress(self) -> int:
        return self._below.peer_progress

    @property
    def silent_for(self) -> float:
        return self._below.silent_for

    @property
    def is_busy(self) -> bool:
        return self._below.is_busy


AnyLink = TypeVar("AnyLink", bound=Link)


class QueueListener(Listener, Generic[AnyLink]):
    """A listener whose `accept` returns links in the order of their opening. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._changed = threading.Condition()
        self._waiting: deque[AnyLink] = deque()
        self._is_closed = False

    def offer(self, link: AnyLink) -> bool:
        """Add a link. Return False, without adding it, after `close`."""
        with self._changed:
            if self._is_closed:
                return False
            self._waiting.append(link)
            self._changed.notify()
            return True

    def accept(self, timeout: float | None = None) -> AnyLink:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, timeout)
            if self._is_closed:
                raise ListenerClosed(f"{self.address} is closed")
            if not self._waiting:
                raise LinkTimeout(f"no peer connected to {self.address} within {timeout:g} s")
            return self._waiting.popleft()

    def close(self) -> None:
        """Drop the links in the queue; every `accept`, now and later, raises ListenerClosed."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
