"""A link on top of a link: outgoing frames pass a wire, and incoming ones, if wanted, another wire.

Heartbeats, and with them `beat`, `peer_progress` and `silent_for`, are those of the link below and are not delayed.

An end follows the frames before it: `close` posts it as the last item on the outgoing wire, and the end of the link
below goes through the incoming one. `abort` drops what is on both.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from tests.emulation.links.profile import LinkProfile
from tests.emulation.links.wire import Item, Wire
from transports.base import DEFAULT_OPTIONS, FLUSH_SECONDS, Frame, FrameError, Link, LinkClosed, LinkOptions
from transports.framing import PRELUDE_BYTES, flatten
from transports.inbox import InboxLink

_QUEUE_FRAMES = 512  # on a wire before `send` waits, as in tcp://


class EmulatedLink(InboxLink):
    """`below` with sent frames delayed and paced as in `profile`; with `both_ways`, received frames as well.

    The peer needs no change. `below` must be new and unread, and must not be used by itself afterwards. `options` are
    those it was made with. Sinks are called on the wire's thread if received frames are delayed, else on the thread of
    the link below; for frames that arrived before `deliver_to`, on its caller's.
    """

    def __init__(
        self, below: Link, profile: LinkProfile, *, both_ways: bool = False, options: LinkOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(below.address, below, options)
        self._out = Wire(profile, self._leave_wire, name=f"to {below.address}")
        self._in: Wire | None = None
        if both_ways:
            self._in = Wire(replace(profile, seed=profile.seed + 1), self._land, name=f"from {below.address}")
        below.deliver_to(self._arrive)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        if (over := self._ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        if not self._out.wait_for_room(_QUEUE_FRAMES, self._options.dead_after):
            self._fail(f"{self.address} took nothing for {self._options.dead_after:g} s: queue full")
        if not self._out.post(flat, PRELUDE_BYTES + flat.num_bytes):
            raise self._ended or LinkClosed("")

    def _leave_wire(self, item: Item) -> None:
        """Called on the outgoing wire's thread."""
        try:
            if isinstance(item, LinkClosed):
                self._below.close(item.reason)
            else:
                self._below.send(item)
        except LinkClosed:
            pass  # the sink gets the end of the link below
        except FrameError as problem:  # the link below has a bound of its own
            self._fail(f"the link below refuses a frame: {problem}")

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _arrive(self, item: Item) -> None:
        """The sink of the link below."""
        is_end = isinstance(item, LinkClosed)
        if self._in is None or (is_end and (self._close_reason is not None or not self._in.takes_more)):
            self._land(item)
        elif isinstance(item, LinkClosed):
            self._in.post_last(item)
        elif self._in.num_bytes > self._options.max_waiting_bytes:
            self._fail(f"more than {self._options.max_waiting_bytes} bytes from {self.address} wait unread")
        else:
            self._in.post(item, PRELUDE_BYTES + item.num_bytes)

    def _land(self, item: Item) -> None:
        """Process what has left the incoming wire."""
        if isinstance(item, LinkClosed):
            self._finish(item.reason if self._close_reason is None else self._close_reason)
        elif self.inbox.ended is None:
            self._take(item)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        give_up_at = time.monotonic() + FLUSH_SECONDS
        with self._state:
            if self._close_reason is None and not self._over.is_set():
                self._close_reason = reason
            close_reason = self._close_reason
        if close_reason is not None:
            self._out.post_last(LinkClosed(close_reason))
        if self._out.is_mine or self._sink_thread == threading.get_ident():
            return  # the wire does the rest
        if not self._over.wait(FLUSH_SECONDS):
            self._finish(close_reason or reason)
            self._below.abort(reason)  # frames left on the wire are dropped, so the peer must not see a complete end
        self._out.join(max(0.0, give_up_at - time.monotonic()))

    def abort(self, reason: str = "") -> None:
        self.inbox.end(reason, drop=True)
        self._finish(reason)
        self._below.abort(reason)

    def _fail(self, reason: str) -> None:
        self._finish(reason)
        self._below.close(reason)

    def _finish(self, reason: str) -> None:
        self.inbox.end(reason)
        self._over.set()
        self._out.stop()
        if self._in is not None:
            self._in.stop()
        self.inbox.pump()
