"""inproc://name: links inside one process, for tests and for stages that share one.

Two links point at each other's inboxes. There is no thread: a frame is in the peer's inbox, or in its sink, before
`send` returns. Payloads are not copied. Nothing can be lost, and nobody can be silent, so neither checksums nor
heartbeats are needed; progress is read from the peer's object.
"""

from __future__ import annotations

import threading

from transports.address import split_scheme
from transports.base import (
    AddressInUse,
    Frame,
    Link,
    LinkOptions,
    LinkTimeout,
    Listener,
)
from transports.framing import flatten
from transports.inbox import QueuedLink, QueueListener


class InprocLink(QueuedLink):
    """One end of a link; `peer` is the other."""

    peer: InprocLink

    def send(self, frame: Frame) -> None:
        if (over := self.inbox.ended) is not None:
            raise over
        self.peer.inbox.deliver(flatten(frame, self._options))

    @property
    def peer_progress(self) -> int:
        return self.peer.progress

    @property
    def silent_for(self) -> float:
        return 0.0

    def close(self, reason: str = "") -> None:
        self._fail(reason)

    def abort(self, reason: str = "") -> None:
        self.inbox.end(reason, drop=True)
        self._fail(f"connection to {self.address} lost" + (f" ({reason})" if reason else ""))

    def _fail(self, reason: str) -> None:
        for end in (self.peer, self):
            end.inbox.end(reason)
            end.inbox.pump()


class InprocListener(QueueListener[InprocLink]):
    def __init__(self, transport: InprocTransport, address: str, options: LinkOptions) -> None:
        super().__init__(address)
        self.options = options
        self.links: list[InprocLink] = []  # used with the transport's lock
        self._transport = transport

    def close(self) -> None:
        self._transport.forget(self)
        super().close()
        for link in self.links:
            link.abort(f"{self.address} stopped listening")


class InprocTransport:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._listeners: dict[str, InprocListener] = {}

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        split_scheme(address)
        with self._changed:
            if address in self._listeners:
                raise AddressInUse(f"{address} is in use")
            self._listeners[address] = listener = InprocListener(self, address, options)
            self._changed.notify_all()
        return listener

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        with self._changed:
            if not self._changed.wait_for(lambda: address in self._listeners, timeout):
                raise LinkTimeout(f"no answer from {address} within {timeout:g} s: there is no listener")
            listener = self._listeners[address]
            here, there = InprocLink(address, options), InprocLink(f"{address} (client)", listener.options)
            here.peer, there.peer = there, here
            listener.links = [known for known in listener.links if known.closed is None] + [there]
            listener.offer(there)  # with the lock held: `close` forgets the listener first, so it sees this link
        return here

    def forget(self, listener: InprocListener) -> None:
        with self._changed:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]
