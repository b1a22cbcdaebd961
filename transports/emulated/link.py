"""A link on top of a link: outgoing frames pass faults and a wire, and incoming ones, if wanted, another wire.

Delays and cuts keep the contract of the link below with any peer. Heartbeats, and with them `beat`, `peer_progress` and
`silent_for`, are those of the link below and are not delayed.

An end follows the frames before it: `close` posts it as the last item on the outgoing wire, and the end of the link
below goes through the incoming one. `abort` drops what is on both.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from transports.base import (
    DEFAULT_OPTIONS,
    FLUSH_SECONDS,
    Frame,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
)
from transports.emulated.faults import Cut, FaultInjector, Gap
from transports.emulated.packets import Packets
from transports.emulated.profile import PACKET_FAULTS, LinkProfile, preset
from transports.emulated.wire import Wire
from transports.framing import PRELUDE_BYTES, Kind, flatten
from transports.inbox import InboxLink

_QUEUE_FRAMES = 512  # on a wire before `send` waits, as in tcp://


def emulate(
    link: Link,
    profile: LinkProfile | str,
    *,
    both_ways: bool = False,
    options: LinkOptions = DEFAULT_OPTIONS,
) -> Link:
    """`link` with sent frames delayed, paced and cut as in `profile`; with `both_ways`, received frames as well.

    The peer needs no change. `link` must be new and unread, and must not be used by itself afterwards. `options` are
    those it was made with. Raises ValueError for faults that need packets, thus both ends: see `EmulatedTransport`.
    """
    chosen = preset(profile)
    if chosen.needs_packets:
        raise ValueError(f"{', '.join(PACKET_FAULTS)} need both ends emulated: use emulated+... in both addresses")
    return EmulatedLink(link, chosen, both_ways=both_ways, options=options)


_Outgoing = Frame | Cut | Gap | LinkClosed
_Incoming = Frame | LinkClosed


class EmulatedLink(InboxLink):
    """A link on top of a link; made by `emulate` and `EmulatedTransport`. It reads the one below by a sink.

    Sinks are called on the wire's thread if received frames are delayed, else on the thread of the link below; for
    frames that arrived before `deliver_to`, on its caller's.
    """

    def __init__(self, below: Link, profile: LinkProfile, *, both_ways: bool, options: LinkOptions) -> None:
        super().__init__(below.address, below, options)
        self._packets = Packets(options) if profile.needs_packets else None
        self._faults = FaultInjector(profile)
        self._writer = threading.Lock()  # one `send` at a time, from its number to its place on the wire
        self._out: Wire[_Outgoing] = Wire(
            profile, self._leave_wire, name=f"to {below.address}", on_idle=self._send_beat
        )
        self._in: Wire[_Incoming] | None = None
        if both_ways:
            backwards = replace(profile, seed=profile.seed + 1)
            # If an abort drops the end on the wire, the sink gets it when the wire ends.
            self._in = Wire(backwards, self._land, name=f"from {below.address}", on_idle=self._inbox.pump)
        below.deliver_to(self._arrive)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        if (over := self._ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        num_bytes = flat.num_bytes
        # Without the lock, which the wire's thread may need to send a heartbeat.
        if not self._out.wait_for_room(_QUEUE_FRAMES, self._options.dead_after):
            self._fail(f"{self.address} took nothing for {self._options.dead_after:g} s: queue full")
        with self._writer:
            packet = flat if self._packets is None else self._packets.data(flat)
            if not all(self._out.post(item, PRELUDE_BYTES + num_bytes) for item in self._faults.apply(packet)):
                raise self._ended or LinkClosed("")
            if self._packets is not None:
                self._packets.count_sent()
            with self._state:
                self._counts = self._counts.plus_sent(num_bytes)

    def _leave_wire(self, item: _Outgoing) -> None:
        """Called on the outgoing wire's thread."""
        try:
            if isinstance(item, Frame):
                self._below.send(item)
            elif isinstance(item, Cut):
                self._below.abort(item.reason)
            elif isinstance(item, LinkClosed):
                self._send_bye(item.reason)
                self._below.close(item.reason)
        except LinkClosed:
            pass  # the sink gets the end of the link below
        except FrameError as problem:  # `options` are not those of the link below
            self._fail(f"the link below refuses a frame: {problem}")

    def _send_bye(self, reason: str) -> None:
        if self._packets is None:
            return
        with self._writer:
            last = [self._packets.bye(reason), *self._faults.held_back()]
        for packet in last:
            self._below.send(packet)

    def _send_beat(self) -> None:
        """Called on the outgoing wire's thread when the wire is empty."""
        if self._packets is None:
            return
        with self._writer:
            beat = self._packets.beat()
            if beat is not None:
                for packet in (beat, *self._faults.held_back()):
                    self._out.post(packet, PRELUDE_BYTES)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _arrive(self, item: _Incoming) -> None:
        """The sink of the link below."""
        is_end = isinstance(item, LinkClosed)
        if self._in is None or (is_end and (self._close_reason is not None or not self._in.takes_more)):
            self._land(item)
        elif isinstance(item, LinkClosed):
            self._in.post_last(item)
        elif self._in.num_bytes > self._options.max_waiting_bytes:
            self._fail_unread()
        else:
            self._in.post(item, PRELUDE_BYTES + item.num_bytes)

    def _land(self, item: _Incoming) -> None:
        """Process what has left the incoming wire."""
        if isinstance(item, LinkClosed):
            self._finish(item.reason if self._close_reason is None else self._close_reason)
        elif self._inbox.ended is None:
            if self._packets is None:
                self._take(item)
            else:
                self._take_packet(self._packets, item)

    def _take_packet(self, packets: Packets, frame: Frame) -> None:
        try:
            packet = packets.unpack(frame)
        except FrameError as problem:
            self._fail(f"bad frame from {self.address}: {problem}")
            return
        if packet.kind is Kind.DATA:
            self._take(Frame(packet.header, packet.parts))

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
        self._inbox.end(reason, drop=True)
        self._stop()
        self._below.abort(reason)  # its sink, `_arrive`, ends this link's

    def _fail(self, reason: str) -> None:
        self._finish(reason)
        self._below.close(reason)

    def _finish(self, reason: str) -> None:
        self._inbox.end(reason)
        self._stop()
        self._inbox.pump()

    def _stop(self) -> None:
        self._over.set()
        self._out.stop()
        if self._in is not None:
            self._in.stop()
