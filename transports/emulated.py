"""A slower, worse link in front of any link: latency, bandwidth, jitter, and faults, all from one `LinkProfile`.

    with installed("1gbe"):                  # every connect() of this process, both directions, peers unchanged
        ...
    emulate(link, PRESETS["wifi"])           # one link, what is sent on it
    connect("emulated+tcp://mini:5577?link=wifi&seed=3")  # by address

A *wire* is one direction: a queue, a thread, and the time at which each frame is due. As on a real wire frames queue
behind each other: one is on it for bytes / bytes_per_second after the one before it has left, and is due `latency` plus
a random part of `jitter` later, never before its predecessor and never early. The thread sleeps until then and hands it
on; so it is late by what the machine takes to wake a thread. Nothing spins.

Delays and cuts keep the contract of the link below, whoever is at its other end. To be *corrupted, duplicated,
reordered or dropped*, frames must be packets: with such a profile both ends have to be emulated (`EmulatedTransport`,
or `emulated+` in both addresses). Each frame then travels as a packet of `framing` in a frame of the link below,

    send -> encode -> faults -> wire ----> link below ----> decode -> Sequencer -> recv

so that checksums and numbers stand above the mishaps, as they do in tcp://, whichever link carries them, and every
mishap ends the link. An unwrapped peer would take a packet for a frame; a wrapped one refuses a frame that is no
packet. A lost tail shows as well: whenever the wire is empty one BEAT follows, with the number that should come next,
and BYE goes before a polite end. Faults strike DATA only, on the side that sends; the same seed strikes the same
frames. With `checksum_parts=False` a corrupted payload is delivered, as it would be by tcp://.

Heartbeats, and with them `beat`, `peer_progress` and `silent_for`, are those of the link below and are not delayed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar
from urllib.parse import parse_qsl, urlencode

from transports.address import calling_it, split_scheme
from transports.base import (
    DEFAULT_OPTIONS,
    FLUSH_SECONDS,
    AddressError,
    Frame,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkStats,
    LinkTimeout,
    Listener,
    Sink,
    Transport,
)
from transports.framing import PRELUDE_BYTES, Kind, Packet, Sequencer, as_bytes, decode, encode, flatten, reason_bytes
from transports.inbox import Inbox
from transports.registry import connected_wrap, wrap_connected

_QUEUE_FRAMES = 512  # on a wire before `send` waits, as in tcp://
_PR_SET_TIMERSLACK = 29


# -- what a link is like -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction of a link. Seconds and bytes; probabilities are per frame. Raises ValueError out of range."""

    latency: float = 0.0  # from the last byte's leaving to its arrival
    jitter: float = 0.0  # at most this much more, uniformly; order is kept, so a late frame holds up the next
    bytes_per_second: float | None = None  # None: no limit
    cut_after_frames: int | None = None  # the connection is lost in place of the next frame
    cut: float = 0.0  # the connection is lost in place of this frame
    corrupt: float = 0.0  # one bit is flipped
    duplicate: float = 0.0
    reorder: float = 0.0  # goes after the next one
    drop: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("latency", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be seconds from 0, not {getattr(self, name)}")
        if self.bytes_per_second is not None and not 0 < self.bytes_per_second < math.inf:
            raise ValueError(f"bytes_per_second must be above 0, not {self.bytes_per_second}")
        if self.cut_after_frames is not None and self.cut_after_frames < 0:
            raise ValueError(f"cut_after_frames must be at least 0, not {self.cut_after_frames}")
        for name in ("cut", *_PACKET_FAULTS):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, not {getattr(self, name)}")

    @property
    def needs_packets(self) -> bool:
        """Whether both ends must be emulated."""
        return any(getattr(self, name) > 0 for name in _PACKET_FAULTS)

    def beyond(self, carrier: LinkProfile) -> LinkProfile:
        """What is left to add to a carrier that itself has `carrier`'s latency and bandwidth; at least nothing."""
        seconds_per_byte = _seconds_per_byte(self) - _seconds_per_byte(carrier)
        return replace(
            self,
            latency=max(0.0, self.latency - carrier.latency),
            bytes_per_second=1 / seconds_per_byte if seconds_per_byte > 0 else None,
        )


_PACKET_FAULTS = ("corrupt", "duplicate", "reorder", "drop")


def _seconds_per_byte(profile: LinkProfile) -> float:
    return 0.0 if profile.bytes_per_second is None else 1 / profile.bytes_per_second


# "notes" is the project's transport.md, section 2. Bandwidths are payload, after the headers below us.
PRESETS: dict[str, LinkProfile] = {
    # Notes: a hop through JACCL takes 10-20 us (bare verbs: 4.2). Verbs carry 4.75 GB/s in 4 KiB and 9.4 GB/s in 64 KiB
    # messages, mx.distributed 3.5-3.8 GB/s with its two copies; 6 is in the middle of what a good one would do.
    "thunderbolt-rdma": LinkProfile(latency=15e-6, bytes_per_second=6e9),
    # Notes: ping 0.38-0.95 ms there and back, 0.67 between two machines; the reading there is 0.3 ms a hop. rsync made
    # 0.3-0.5 GB/s, which is ssh's speed; iperf3 made 16.4 Gbit/s on a 20 Gbit/s USB4 cable (jiribrejcha.net, 2024).
    # No TCP figure for Thunderbolt 5 is at hand; it may well be above this.
    "thunderbolt-ip": LinkProfile(latency=0.3e-3, bytes_per_second=2e9),
    # 1.25 GB/s less Ethernet, IP and TCP headers (1448 of 1538 bytes) is 1.18; the rest is what one stream loses in
    # practice. 0.1 ms a hop: a switch and two network stacks with interrupt moderation; assumed, not in the notes.
    "10gbe": LinkProfile(latency=0.1e-3, bytes_per_second=1.1e9),
    # 125 MB/s x 1448/1538 = 117.7. A ping of 0.4 ms through a home switch, energy-saving Ethernet on; assumed.
    "1gbe": LinkProfile(latency=0.2e-3, bytes_per_second=117e6),
    # Notes: 4.9-54 ms there and back between Macs of one cluster; 3 ms plus up to 5 gives 6-16, its better end.
    # 50 MB/s: 802.11ac, two streams, same room; assumed. The air carries one direction at a time, this carries two.
    "wifi": LinkProfile(latency=3e-3, jitter=5e-3, bytes_per_second=50e6),
}


_MILLISECONDS = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)ms")


def preset(profile: LinkProfile | str) -> LinkProfile:
    """A profile itself, the preset of that name, or, for a name such as 3ms, a fast wire of that latency one way.

    Raises ValueError listing the names.
    """
    if isinstance(profile, LinkProfile):
        return profile
    if latency := _MILLISECONDS.fullmatch(profile):
        return replace(PRESETS["10gbe"], latency=float(latency[1]) / 1000)
    if profile not in PRESETS:
        raise ValueError(f"no link preset {profile!r}; known: {', '.join(PRESETS)}")
    return PRESETS[profile]


# -- one direction -----------------------------------------------------------------------------------------------------

T = TypeVar("T")


class Wire(Generic[T]):
    """Hands each item to `deliver`, on a thread of its own, when it is due.

    The thread ends after `stop`, or after the last item (`post_last`). It calls `on_idle` whenever nothing is left, and
    before it ends.
    """

    def __init__(
        self,
        profile: LinkProfile,
        deliver: Callable[[T], None],
        *,
        name: str,
        on_idle: Callable[[], None],
    ) -> None:
        self._latency = profile.latency
        self._jitter = profile.jitter
        self._seconds_per_byte = _seconds_per_byte(profile)
        self._deliver = deliver
        self._on_idle = on_idle
        self._chance = random.Random(profile.seed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the thread
        self._has_room = threading.Condition(self._lock)  # for who posts
        self._queue: deque[tuple[float, T, int]] = deque()
        self._num_bytes = 0
        self._free_at = 0.0  # when the last byte posted so far has left
        self._arrived_at = 0.0  # when the item posted last is due
        self._takes_more = True
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=f"transports emulated {name}", daemon=True)
        self._thread.start()

    def post(self, item: T, num_bytes: int) -> bool:
        """Put it behind the others, however many they are. False, and nothing happens, after `post_last` or `stop`."""
        with self._lock:
            if self._takes_more:
                self._append(item, num_bytes)
            return self._takes_more

    def post_last(self, item: T) -> None:
        """After this item the wire ends; nothing more is taken, whoever waits for room is sent away."""
        with self._lock:
            if self._takes_more:
                self._append(item, 0)
                self._takes_more = False
                self._has_room.notify_all()

    def wait_for_room(self, num_frames: int, patience: float) -> bool:
        """Until fewer than `num_frames` wait, or nothing more is taken. False if the first is overdue by `patience`.

        A slow wire is no reason to give up, however long it takes; one that does not get rid of its frames is.
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
        """How much is under way."""
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

    def _append(self, item: T, num_bytes: int) -> None:
        self._free_at = max(time.monotonic(), self._free_at) + num_bytes * self._seconds_per_byte
        flight = self._latency + (self._chance.uniform(0, self._jitter) if self._jitter else 0.0)
        self._arrived_at = max(self._arrived_at, self._free_at + flight)
        self._queue.append((self._arrived_at, item, num_bytes))
        self._num_bytes += num_bytes
        if len(self._queue) == 1:  # otherwise the thread waits for an earlier one
            self._changed.notify()

    def _run(self) -> None:
        _wake_on_time()
        while (taken := self._next()) is not None:
            self._deliver(taken[1])
            if not self._queue:
                self._on_idle()
        self._on_idle()

    def _next(self) -> tuple[float, T, int] | None:
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

    def _pop(self) -> tuple[float, T, int]:
        taken = self._queue.popleft()
        self._num_bytes -= taken[2]
        self._has_room.notify()
        return taken


def _wake_on_time() -> None:
    """Linux lets a sleeping thread oversleep by 50 us to save power; ask for 1 ns, for this thread only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))


# -- what goes wrong, and how it is noticed ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """In place of a frame: here the connection is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Gap:
    """In place of a frame: its time on the wire, and nothing comes out."""


class _Mishaps:
    """Decides frame by frame what goes wrong. The same profile, seed included, does the same to the same frames."""

    def __init__(self, profile: LinkProfile) -> None:
        self._profile = profile
        self._chance = random.Random(profile.seed)
        self._num_seen = 0
        self._held: Frame | None = None
        self._is_cut = False

    def befall(self, packet: Frame) -> list[Frame | _Cut | _Gap]:
        """What goes on the wire in place of this DATA packet."""
        if self._is_cut:
            return []
        if self._profile.cut_after_frames == self._num_seen or self._strikes("cut"):
            self._is_cut = True
            return [_Cut(f"the emulated link was cut after {self._num_seen} frames")]
        self._num_seen += 1
        fault = next((name for name in _PACKET_FAULTS if self._strikes(name)), None)
        if fault == "drop":
            return [_Gap()]
        if fault == "reorder" and self._held is None:
            self._held = packet
            return [_Gap()]
        if fault == "corrupt":
            packet = self._flip_a_bit(packet)
        return [packet, *([packet] if fault == "duplicate" else []), *self.held_back()]

    def held_back(self) -> list[Frame]:
        """What was held back to follow the next packet."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _strikes(self, name: str) -> bool:
        return bool(self._chance.random() < getattr(self._profile, name))

    def _flip_a_bit(self, packet: Frame) -> Frame:
        """A copy, since the sender's buffers are not ours to change."""
        buffers = [memoryview(packet.header), *map(as_bytes, packet.parts)]
        bit = self._chance.randrange(8 * sum(buffer.nbytes for buffer in buffers))
        for index, buffer in enumerate(buffers):
            if bit < 8 * buffer.nbytes:
                damaged = bytearray(buffer)
                damaged[bit // 8] ^= 1 << bit % 8
                header = bytes(damaged) if index == 0 else packet.header
                parts = tuple(damaged if at == index else part for at, part in enumerate(buffers[1:], 1))
                return Frame(header, parts)
            bit -= 8 * buffer.nbytes
        raise AssertionError("a packet has at least a prelude")


class _Packets:
    """Frames as packets inside frames of the link below: the first string of a packet is the header, the rest parts."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._sequencer = Sequencer()
        self._num_sent = 0
        self._num_told = 0

    def data(self, flat: Frame) -> Frame:
        """The next DATA packet; it counts once `count_sent` was called."""
        parts = [as_bytes(part) for part in flat.parts]
        checksum = self._options.checksum_parts
        first, *_ = encode(Kind.DATA, seq=self._num_sent, header=flat.header, parts=parts, checksum=checksum)
        return Frame(bytes(as_bytes(first)), tuple(parts))

    def count_sent(self) -> None:
        self._num_sent += 1

    def beat(self) -> Frame | None:
        """A BEAT with the number of the next DATA packet; None if one has said that."""
        if self._num_told == self._num_sent:
            return None
        self._num_told = self._num_sent
        return Frame(bytes(as_bytes(encode(Kind.BEAT, seq=self._num_sent)[0])))

    def bye(self, reason: str) -> Frame:
        return Frame(bytes(as_bytes(encode(Kind.BYE, seq=self._num_sent, header=reason_bytes(reason))[0])))

    def unpack(self, frame: Frame) -> Packet:
        """Raises FrameError for whatever is damaged, doubled, out of order, or after something missing."""
        packet = decode([frame.header, *frame.parts], self._options)
        self._sequencer.admit(packet)
        if packet.kind in (Kind.OPEN, Kind.ACCEPT):
            raise FrameError(f"{packet.kind.name} on an open link")
        return packet


# -- the link ----------------------------------------------------------------------------------------------------------


def emulate(
    link: Link,
    profile: LinkProfile | str,
    *,
    both_ways: bool = False,
    options: LinkOptions = DEFAULT_OPTIONS,
) -> Link:
    """`link` with what is sent on it delayed, paced and cut as in `profile`; with `both_ways`, what comes as well.

    The peer needs nothing. `link` must be fresh: nobody has read from it, and nobody uses it afterwards. `options` are
    those it was made with. Raises ValueError for faults that need packets, thus both ends: see `EmulatedTransport`.
    """
    chosen = preset(profile)
    if chosen.needs_packets:
        raise ValueError(f"{', '.join(_PACKET_FAULTS)} need both ends emulated: use emulated+... in both addresses")
    return EmulatedLink(link, chosen, both_ways=both_ways, options=options)


_Outgoing = Frame | _Cut | _Gap | LinkClosed
_Incoming = Frame | LinkClosed


class EmulatedLink(Link):
    """A link on a link; made by `emulate` and `EmulatedTransport`. It reads the one below by a sink.

    Sinks are called on the wire's thread if what comes is delayed, else on the thread of the link below; what has
    arrived before `deliver_to`, by its caller.
    """

    def __init__(self, below: Link, profile: LinkProfile, *, both_ways: bool, options: LinkOptions) -> None:
        self.address = below.address
        self._below = below
        self._options = options
        self._packets = _Packets(options) if profile.needs_packets else None
        self._mishaps = _Mishaps(profile)
        self._inbox = Inbox(options.max_waiting_bytes)
        self._over = threading.Event()
        self._writer = threading.Lock()  # one `send` at a time, from its number to its place on the wire
        self._state = threading.Lock()  # never held while anything else is called
        self._farewell: str | None = None  # why close() was called
        self._counts = LinkStats()
        self._sink_thread: int | None = None
        self._out: Wire[_Outgoing] = Wire(
            profile, self._leave_wire, name=f"to {below.address}", on_idle=self._send_beat
        )
        self._in: Wire[_Incoming] | None = None
        if both_ways:
            backwards = replace(profile, seed=profile.seed + 1)
            # Should the end be dropped on the wire because of an abort, the sink is told when the wire ends.
            self._in = Wire(backwards, self._land, name=f"from {below.address}", on_idle=self._inbox.pump)
        below.deliver_to(self._arrive)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        if (over := self._ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        num_bytes = flat.num_bytes
        # Without the lock: the wire's thread may want it, to say that it is empty.
        if not self._out.wait_for_room(_QUEUE_FRAMES, self._options.dead_after):
            self._fail(f"{self.address} took nothing for {self._options.dead_after:g} s: queue full")
        with self._writer:
            packet = flat if self._packets is None else self._packets.data(flat)
            if not all(self._out.post(item, PRELUDE_BYTES + num_bytes) for item in self._mishaps.befall(packet)):
                raise self._ended or LinkClosed("")
            if self._packets is not None:
                self._packets.count_sent()
            with self._state:
                self._counts = self._counts.plus_sent(num_bytes)

    def _leave_wire(self, item: _Outgoing) -> None:
        """On the outgoing wire's thread."""
        try:
            if isinstance(item, Frame):
                self._below.send(item)
            elif isinstance(item, _Cut):
                self._below.abort(item.reason)
            elif isinstance(item, LinkClosed):
                self._say_bye(item.reason)
                self._below.close(item.reason)
        except LinkClosed:
            pass  # the sink is told, or was
        except FrameError as problem:  # the options given to us are not those of the link below
            self._fail(f"the link below refuses a frame: {problem}")

    def _say_bye(self, reason: str) -> None:
        if self._packets is None:
            return
        with self._writer:
            last = [self._packets.bye(reason), *self._mishaps.held_back()]
        for packet in last:
            self._below.send(packet)

    def _send_beat(self) -> None:
        """On the outgoing wire's thread, when the wire is empty."""
        if self._packets is None:
            return
        with self._writer:
            beat = self._packets.beat()
            if beat is not None:
                for packet in (beat, *self._mishaps.held_back()):
                    self._out.post(packet, PRELUDE_BYTES)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _arrive(self, item: _Incoming) -> None:
        """The sink of the link below."""
        is_end = isinstance(item, LinkClosed)
        if self._in is None or (is_end and (self._farewell is not None or not self._in.takes_more)):
            self._land(item)
        elif isinstance(item, LinkClosed):
            self._in.post_last(item)
        elif self._in.num_bytes > self._options.max_waiting_bytes:
            self._fail_unread()
        else:
            self._in.post(item, PRELUDE_BYTES + item.num_bytes)

    def _land(self, item: _Incoming) -> None:
        """Something has come out of the wire."""
        if isinstance(item, LinkClosed):
            self._finish(item.reason if self._farewell is None else self._farewell)
        elif self._inbox.ended is None:
            if self._packets is None:
                self._take(item)
            else:
                self._take_packet(self._packets, item)

    def _take_packet(self, packets: _Packets, frame: Frame) -> None:
        try:
            packet = packets.unpack(frame)
        except FrameError as problem:
            self._fail(f"bad frame from {self.address}: {problem}")
            return
        if packet.kind is Kind.DATA:
            self._take(Frame(packet.header, packet.parts))

    def _take(self, frame: Frame) -> None:
        if self._farewell is not None:  # close() was called: too late
            return
        num_bytes = frame.num_bytes
        with self._state:
            self._counts = self._counts.plus_received(num_bytes)
        if self._inbox.put(frame, num_bytes):
            self._inbox.pump()
        else:
            self._fail_unread()

    def recv(self, timeout: float | None = None) -> Frame:
        frame = self._inbox.get(timeout)
        if frame is None:
            raise LinkTimeout(f"nothing from {self.address} within {timeout:g} s")
        return frame

    def deliver_to(self, sink: Sink) -> None:
        def guarded(item: Frame | LinkClosed) -> None:
            self._sink_thread = threading.get_ident()
            try:
                sink(item)
            finally:
                self._sink_thread = None

        self._inbox.attach(guarded)
        self._inbox.pump()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        give_up_at = time.monotonic() + FLUSH_SECONDS
        with self._state:
            if self._farewell is None and not self._over.is_set():
                self._farewell = reason
            farewell = self._farewell
        if farewell is not None:
            self._out.post_last(LinkClosed(farewell))
        if self._out.is_mine or self._sink_thread == threading.get_ident():
            return  # the wire does the rest
        if not self._over.wait(FLUSH_SECONDS):
            self._finish(farewell or reason)
            self._below.abort(reason)  # what is left on the wire is dropped, and the peer must not take it for all
        self._out.join(max(0.0, give_up_at - time.monotonic()))

    def abort(self, reason: str = "") -> None:
        self._inbox.end(reason, drop=True)
        self._stop()
        self._below.abort(reason)  # and it tells `_arrive`, which tells the sink

    def _fail(self, reason: str) -> None:
        """The contract is broken: end the link, telling the peer why."""
        self._finish(reason)
        self._below.close(reason)

    def _fail_unread(self) -> None:
        self._fail(f"more than {self._options.max_waiting_bytes} bytes from {self.address} wait unread")

    def _finish(self, reason: str) -> None:
        self._inbox.end(reason)
        self._stop()
        self._inbox.pump()

    def _stop(self) -> None:
        self._over.set()
        self._out.stop()
        if self._in is not None:
            self._in.stop()

    @property
    def _ended(self) -> LinkClosed | None:
        """Why nothing can be sent any more."""
        if self._farewell is not None and self._inbox.ended is None:
            return LinkClosed(self._farewell)
        return self._inbox.ended

    # -- the rest ----------------------------------------------------------------------------------------------------

    def beat(self, progress: int) -> None:
        self._below.beat(progress)

    @property
    def peer_progress(self) -> int:
        return self._below.peer_progress

    @property
    def silent_for(self) -> float:
        return self._below.silent_for

    @property
    def closed(self) -> LinkClosed | None:
        return self._inbox.ended

    @property
    def stats(self) -> LinkStats:
        return self._counts


# -- every link of this process ----------------------------------------------------------------------------------------


def install(profile: LinkProfile | str | None) -> None:
    """From now on every link that `connect` makes in this process is emulated, both ways; None: no longer.

    One side is enough, the peers are as they always are. Links that a listener accepts are left alone, and so are those
    that two other processes make between themselves: whoever sends them to each other does so by `address_for_others`.
    Raises ValueError as `emulate` does.
    """
    wrap_connected(None if profile is None else _BothWays(profile))


@contextlib.contextmanager
def installed(profile: LinkProfile | str) -> Iterator[None]:
    """`install` for the length of a `with` block; links made in it stay emulated."""
    before = wrap_connected(_BothWays(profile))
    try:
        yield
    finally:
        wrap_connected(before)


def address_for_others(address: str) -> str:
    """By this address another process makes the link that `connect(address)` makes in this one: as emulated as here."""
    wrap = connected_wrap()
    return wrap.address(address) if isinstance(wrap, _BothWays) else address


class _BothWays:
    """What `install` does to a link, and the address that says the same."""

    def __init__(self, profile: LinkProfile | str) -> None:
        self._profile = preset(profile)
        if self._profile.needs_packets:
            raise ValueError(f"{', '.join(_PACKET_FAULTS)} cannot be emulated from one side")

    def __call__(self, link: Link, options: LinkOptions) -> Link:
        return link if isinstance(link, EmulatedLink) else emulate(link, self._profile, both_ways=True, options=options)

    def address(self, address: str) -> str:
        if address.startswith("emulated+"):
            return address
        values = ((field.name, getattr(self._profile, field.name), field.default) for field in fields(LinkProfile))
        query = {name: repr(value) for name, value, default in values if value != default}
        mark = "&" if "?" in address else "?"
        return f"emulated+{address}{mark}{urlencode({**query, 'both_ways': 1})}"


# -- by address --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """An address taken apart: `emulated+tcp://host:port?link=wifi` -> `tcp://host:port`, `?link=wifi`, its meaning."""

    below: str
    query: str
    profile: LinkProfile
    both_ways: bool


class EmulatedTransport:
    """Another transport's links, emulated: `inner`'s addresses under a scheme of their own, with an optional query.

        ?link=wifi     a preset to start from, in place of `profile`
        &seed=3        any field of LinkProfile
        &both_ways=1   what comes is delayed as well, for a peer that is not emulated

    Each end emulates what it sends, so by default both ends are given the same.
    """

    def __init__(self, inner: Transport, profile: LinkProfile | str = LinkProfile(), *, scheme: str = "") -> None:
        self.scheme = scheme or f"emulated+{inner.scheme}"
        self._inner = inner
        self._profile = preset(profile)

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        place = self._parse(address)
        with calling_it(address, place.below):
            below = self._inner.connect(place.below, timeout=timeout, options=_options_below(place.profile, options))
        return EmulatedLink(below, place.profile, both_ways=place.both_ways, options=options)

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        place = self._parse(address)
        with calling_it(address, place.below):
            below = self._inner.listen(place.below, options=_options_below(place.profile, options))
        rest = split_scheme(below.address)[1].partition("?")[0]  # what followed it is in our own query
        return EmulatedListener(below, f"{self.scheme}://{rest}{place.query}", place, options)

    def _parse(self, address: str) -> _Place:
        _, rest = split_scheme(address)
        rest, mark, query = rest.partition("?")
        changes: dict[str, float | int] = {}
        for_below: dict[str, str] = {}
        profile, both_ways = self._profile, False
        try:
            for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
                if name == "link":
                    profile = preset(value)
                elif name == "both_ways":
                    both_ways = bool(int(value))
                elif name in getattr(self._inner, "query_names", ()):
                    for_below[name] = value
                else:
                    changes[name] = _number(name, value)
            profile = replace(profile, **changes)  # type: ignore[arg-type]  # _number knows which is which
        except ValueError as problem:
            raise AddressError(f"{address!r}: {problem}") from None
        below = f"{self._inner.scheme}://{rest}" + (f"?{urlencode(for_below)}" if for_below else "")
        return _Place(below, mark + query, profile, both_ways)


class EmulatedListener(Listener):
    def __init__(self, below: Listener, address: str, place: _Place, options: LinkOptions) -> None:
        self.address = address
        self._below = below
        self._place = place
        self._options = options
        self._lock = threading.Lock()
        self._links: list[Link] = []

    def accept(self, timeout: float | None = None) -> Link:
        with calling_it(self.address, self._below.address):
            below = self._below.accept(timeout)
        link = EmulatedLink(below, self._place.profile, both_ways=self._place.both_ways, options=self._options)
        with self._lock:
            self._links = [known for known in self._links if known.closed is None] + [link]
        return link

    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.abort(f"{self.address} stopped listening")
        self._below.close()


def _number(name: str, value: str) -> float | int:
    names = [field.name for field in fields(LinkProfile)]
    if name not in names:
        raise ValueError(f"unknown {name!r}; known: link, both_ways, {', '.join(names)}")
    return int(value) if name in ("seed", "cut_after_frames") else float(value)


def _options_below(profile: LinkProfile, options: LinkOptions) -> LinkOptions:
    """Packets are frames with a longer header and a checksum of their own."""
    if not profile.needs_packets:
        return options
    max_header_bytes = min(options.max_header_bytes + PRELUDE_BYTES, (1 << 32) - 1)
    return replace(options, max_header_bytes=max_header_bytes, checksum_parts=False)
