"""Queues a listener's new links until `accept`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from transports.base import Link, LinkTimeout, Listener, ListenerClosed

AnyLink = TypeVar("AnyLink", bound=Link)


class QueueListener(Listener, Generic[AnyLink]):
    """Returns links in the order in which they were opened. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._changed = threading.Condition()
        self._waiting: deque[AnyLink] = deque()
        self._is_closed = False

    def offer(self, link: AnyLink) -> bool:
        """Add a link. False after `close`: it was not added."""
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
