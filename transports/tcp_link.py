"""One peer of a tcp socket: the `Link` that callers use, with the state that its hub holds for it.

The caller's side is here: numbering and encoding frames, reading the inbox, waiting. Everything that touches the zmq
socket is the hub's, which also decides when a link ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from transports.base import Buffer, Frame, Link, LinkClosed, LinkOptions, LinkTimeout, Sink
from transports.framing import Kind, Liveness, Sequencer, encode, flatten
from transports.inbox import Inbox

if TYPE_CHECKING:
    from transports.hub import Hub

RETRY_SECONDS = 0.005  # how often a full queue is tried again

Message = Sequence[Buffer]


class TcpLink(Link):
    """One peer on a hub. `route`: what precedes every message on its socket: () or, on a ROUTER, its routing id."""

    def __init__(self, hub: Hub, address: str, route: tuple[bytes, ...], options: LinkOptions) -> None:
        self.address = address
        self.route = route
        self.opening = b""  # of an accepted link: the kind that the connecting side asked for; empty: a plain link
        self.inbox = Inbox(options.max_waiting_bytes, lambda reason: self._hub.fail(self, reason))
        self.over = threading.Event()
        # The rest is the hub's: used under its lock, or only by its thread.
        self.num_sent = 0
        self.progress = 0
        self.close_reason: str | None = None  # why close() was called
        self.close_by = math.inf
        self.has_sent_bye = False
        self.sequencer = Sequencer()
        self.liveness = Liveness(options, time.monotonic())
        self.received_progress = 0
        self._hub = hub
        self._options = options
        self._writer = threading.Lock()

    def send(self, frame: Frame) -> None:
        if (over := self.inbox.ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        with self._writer:
            message = encode(
                Kind.DATA,
                seq=self.num_sent,
                progress=self.progress,
                header=flat.header,
                parts=cast("tuple[memoryview, ...]", flat.parts),
                checksum=self._options.checksum_parts,
            )
            self._post(message)

    def _post(self, message: Message) -> None:
        give_up_at = time.monotonic() + self._options.dead_after
        while not self._hub.post(self, message):
            if time.monotonic() > give_up_at:
                self._hub.fail(self, f"{self.address} took nothing for {self._options.dead_after:g} s: queue full")
            self.over.wait(RETRY_SECONDS)

    def recv(self, timeout: float | None = None) -> Frame:
        until = math.inf if timeout is None else time.monotonic() + timeout
        if not self.inbox.is_readable:
            self._hub.drive(self, until)
        frame = self.inbox.get(None if timeout is None else max(0.0, until - time.monotonic()))
        if frame is None:
            raise LinkTimeout(f"nothing from {self.address} within {timeout:g} s")
        return frame

    def deliver_to(self, sink: Sink) -> None:
        self.inbox.attach(sink)
        self._hub.pump(self)

    def set_progress(self, progress: int) -> None:
        if not 0 <= progress < 1 << 64:
            raise ValueError(f"progress must be in [0, 2**64), not {progress}")
        self.progress = progress

    @property
    def peer_progress(self) -> int:
        return self.received_progress

    @property
    def silent_for(self) -> float:
        return self.liveness.silent_for(time.monotonic())

    def close(self, reason: str = "") -> None:
        self._hub.leave(self, reason)

    def abort(self, reason: str = "") -> None:
        self._hub.abort(self, reason)

    @property
    def closed(self) -> LinkClosed | None:
        return self.inbox.ended
