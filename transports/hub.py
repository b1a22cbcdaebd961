"""The I/O thread of tcp://: one hub serves one zmq socket and every link on it.

Only one thread at a time may use a zmq socket, so all use of it happens under the hub's lock, and only the hub's thread
receives. It sleeps in poll() on three descriptors: the socket's, its monitor's (which reports connections made and
lost), and a pipe to wake it. The descriptor of a zmq socket is *edge-triggered*: any call on the socket may swallow the
signal for a message that has arrived. Hence the rule: a thread that has used the socket reads EVENTS before it releases
the lock, and wakes the hub's thread (or does not go to sleep) if something can be read.

`send` runs in the caller's thread up to zmq's queue. Decoding and sinks run in the hub's thread without the lock, so
that checking a large payload delays no sender. Each round reads the socket until it is empty, and only then acts on
connections that were lost and on silence: frames that arrived before an end are delivered before it, and a loop that
was held up finds the heartbeats that arrived meanwhile.

The end of a link: `leave` (polite) has the thread send BYE and waits for the peer's BYE, which proves that everything
sent before was received; `_finish` puts the reason into the inbox, once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import cast

import zmq

from transports import threads
from transports.acknowledged import duplicate, machine_answers
from transports.base import FLUSH_SECONDS, Buffer, Frame, FrameError, LinkClosed, LinkOptions, Sink
from transports.framing import (
    INLINE_BYTES,
    FrameKind,
    Liveness,
    check_order,
    decode,
    encode,
    flatten,
    reason_bytes,
    reason_of,
)
from transports.inbox import QueuedLink

_MESSAGES_PER_ROUND = 256  # so that a flood cannot keep the thread from its other work
_RETRY_SECONDS = 0.005  # how often a full queue is tried again
_EVENT = struct.Struct("=Hi")  # which event, and its value
_POLLIN = int(zmq.POLLIN)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def parse_event(message: Sequence[bytes]) -> tuple[zmq.Event, int]:
    """Return the event in a monitor's message, and its value: a descriptor, an error number or a code.

    ``zmq.utils.monitor`` parses events as well, but imports asyncio, which costs 50 ms at every start.
    """
    event, value = _EVENT.unpack(message[0])
    return zmq.Event(event), value


def source_of(body: Sequence[zmq.Frame]) -> int:
    """Return the descriptor that a message came from; -1 if zmq does not know it, as for peers with ZMTP 2 or older.

    Such peers cannot be transports of this package. Their connections are shut like silent ones.
    """
    try:
        return int(body[0].get(zmq.SRCFD)) if body else -1
    except zmq.ZMQError:
        return -1


class TcpLink(QueuedLink):
    """One peer on a hub. `route` precedes every message on its socket: () or, on a ROUTER, the peer's routing id."""

    def __init__(self, hub: Hub, address: str, route: tuple[bytes, ...], options: LinkOptions) -> None:
        super().__init__(address, options)
        self.route = route
        self.opening = b""  # of an accepted link: the kind that the connecting side asked for; empty: a plain link
        self.over = threading.Event()
        # The rest is the hub's: used under its lock, or only by its thread.
        self.num_sent = self.num_received = 0  # frames
        self.close_reason: str | None = None  # why close() was called
        self.close_by = math.inf
        self.has_sent_bye = False
        self.liveness = Liveness(options, time.monotonic())
        self.received_progress = 0
        self._hub = hub
        self._writer = threading.Lock()

    def send(self, frame: Frame) -> None:
        if (over := self.inbox.ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        parts = cast("tuple[memoryview, ...]", flat.parts)
        with self._writer:
            message = encode(FrameKind.DATA, seq=self.num_sent, progress=self.progress, header=flat.header, parts=parts)
            give_up_at = time.monotonic() + self._options.silent_after
            while not self._hub.post(self, message):
                if time.monotonic() > give_up_at:
                    limit = self._options.silent_after
                    self._hub.fail(self, f"{self.address} took nothing for {limit:g} s: queue full")
                self.over.wait(_RETRY_SECONDS)

    def deliver_to(self, sink: Sink) -> None:
        self.inbox.attach(sink)
        self._hub.pump(self)

    @property
    def peer_progress(self) -> int:
        return self.received_progress

    @property
    def silent_for(self) -> float:
        return self.liveness.silent_for(time.monotonic())

    @property
    def is_busy(self) -> bool:
        return self.liveness.is_busy

    def close(self, reason: str = "") -> None:
        self._hub.leave(self, reason)

    def abort(self, reason: str = "") -> None:
        self._hub.abort(self, reason)

    def _fail(self, reason: str) -> None:
        self._hub.fail(self, reason)


class Hub:
    """The thread, and everything that the hubs of connecting and listening sockets have in common."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], options: LinkOptions, name: str) -> None:
        self._socket, self._monitor, self._options = socket, monitor, options
        self._lock = threading.Lock()
        self._links: set[TcpLink] = set()
        self._to_pump: deque[TcpLink] = deque()
        self._tend_at = 0.0
        self._is_touched = True  # whether the socket was used since it was read until it was empty
        self._is_stopping = False
        self._is_stopped = False
        self._linger = 0.0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._poll, self._monitor_descriptor = select.poll(), monitor.FD
        for descriptor in (socket.FD, self._monitor_descriptor, self._wake_out):
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threads.make(self._run, f"transports {name}")

    # -- called from any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def post(self, link: TcpLink, message: Sequence[Buffer]) -> bool:
        """Pass a DATA packet to zmq. Return False if zmq's queue is full. Raises LinkClosed."""
        with self._lock:
            if link.over.is_set() or link.close_reason is not None:
                raise link.closed or LinkClosed(link.close_reason or "")
            if not self._try_send(link, message):
                return False
            if link.over.is_set():
                raise link.closed or LinkClosed("")
            link.num_sent += 1
            if self._has_input():
                self._wake()
        return True

    def pump(self, link: TcpLink) -> None:
        """Let the hub's thread empty the link's inbox into its sink; do it here if the thread has ended."""
        with self._lock:
            if not self._is_stopped:
                self._to_pump.append(link)
                self._wake()
                return
        link.inbox.pump()

    def leave(self, link: TcpLink, reason: str) -> None:
        """Send BYE after all frames, wait for the answer (unless a sink makes the call), end the link."""
        with self._lock:
            if link.close_reason is None and not link.over.is_set():
                link.close_reason = reason
                link.close_by = time.monotonic() + FLUSH_SECONDS
            self._tend_at = 0.0
            self._wake()
        if threading.current_thread() is self._thread:
            return
        link.over.wait(FLUSH_SECONDS)
        with self._lock:
            self._finish(link, reason)
            self._wake()
        self._settle()

    def abort(self, link: TcpLink, reason: str) -> None:
        with self._lock:
            link.inbox.end(reason, drop=True)
            self._finish(link, reason)
            self._drop(link)
            self._wake()

    def fail(self, link: TcpLink, reason: str) -> None:
        """End a link that broke the contract, and send the peer the reason if possible."""
        with self._lock:
            self._fail(link, reason)
            self._wake()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake the thread that sleeps in poll()."""
        if not self._is_stopped:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
                os.write(self._wake_in, b"\0")

    def _has_input(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & _POLLIN)

    def _try_send(self, link: TcpLink, message: Sequence[Buffer]) -> bool:
        """Return whether zmq took the message. If the peer is gone, the link ends, and that counts as taken."""
        self._is_touched = True
        *first, last = cast("Sequence[bytes | memoryview]", message)
        try:
            # pyzmq keeps parts that are not copied alive until they are sent.
            for name in link.route:
                self._socket.send(name, _MORE)
            for part in first:
                self._socket.send(part, _MORE, copy=len(part) < INLINE_BYTES)
            self._socket.send(last, zmq.NOBLOCK, copy=len(last) < INLINE_BYTES)
        except zmq.Again:
            return False
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            self._finish(link, f"connection to {link.address} lost")
        return True

    def _send_bye(self, link: TcpLink, reason: str) -> bool:
        link.has_sent_bye = True
        bye = encode(FrameKind.BYE, seq=link.num_sent, progress=link.progress, header=reason_bytes(reason))
        return self._try_send(link, bye)

    def _fail(self, link: TcpLink, reason: str) -> None:
        if not link.over.is_set():
            link.inbox.end(reason)  # before the BYE: when the peer has that, this end has the reason
            self._send_bye(link, reason)
            self._linger = FLUSH_SECONDS
            self._finish(link, reason)

    def _finish(self, link: TcpLink, reason: str) -> None:
        link.inbox.end(reason)
        if link.over.is_set():
            return
        self._links.discard(link)
        self._to_pump.append(link)
        self._on_finished(link)
        link.over.set()

    # -- implemented by the two kinds of hub -------------------------------------------------------------------------

    def _on_finished(self, link: TcpLink) -> None:
        """Handle the end of a link whose connection is still there. Called with the lock held."""
        raise NotImplementedError

    def _descriptor_of(self, link: TcpLink) -> int:
        """Return the descriptor of the link's connection, or -1 if it is unknown."""
        raise NotImplementedError

    def _drop(self, link: TcpLink) -> None:
        """End the link's connection now and drop its queued messages. Called with the lock held."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait, in the caller's thread and bounded, until a link that ended politely has freed its resources."""

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        raise NotImplementedError

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        raise NotImplementedError

    def _on_dry(self) -> None:
        """End the links of connections that were reported as lost: all their input has now been read."""
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        """Do periodic work. Called about every `beat_every` seconds."""

    def _is_idle(self) -> bool:
        """Return whether nothing needs a timer, so that the thread may sleep until something happens."""
        return not self._links

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_monitor()  # the calls that opened the socket may have swallowed its signals
            ready: list[int] = []
            while True:
                self._attend(ready)
                if self._is_stopping:
                    return
                ready = self._wait()
        finally:
            self._shut()

    def _wait(self) -> list[int]:
        """Sleep until something happens or a heartbeat is due. Return the descriptors that are ready."""
        wait = None
        with self._lock:
            if self._to_pump or self._is_stopping or (self._is_touched and self._has_input()):
                return []
            if not self._is_idle():
                wait = math.ceil(1000 * max(0.0, self._tend_at - time.monotonic()))
        return [descriptor for descriptor, _ in self._poll.poll(wait)]

    def _attend(self, ready: list[int]) -> None:
        if self._wake_out in ready:
            os.read(self._wake_out, 4096)
        if self._monitor_descriptor in ready:  # edge-triggered too, but always read until it is dry
            self._read_monitor()
        is_dry = self._read_socket()
        now = time.monotonic()
        if is_dry:
            self._on_dry()
        if now >= self._tend_at:
            self._tend(now, is_dry=is_dry)
        if self._to_pump:
            self._pump_all()

    def _read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._on_monitor(*parse_event(self._monitor.recv_multipart(zmq.NOBLOCK)))

    def _read_socket(self) -> bool:
        """Receive messages. Return True if everything was read, False if the round is over."""
        for _ in range(_MESSAGES_PER_ROUND):
            with self._lock:
                if not self._has_input():  # cheaper than an exception
                    self._is_touched = False
                    return True
                message = [self._socket.recv(zmq.NOBLOCK, copy=False)]
                while message[-1].more:
                    message.append(self._socket.recv(zmq.NOBLOCK, copy=False))
            self._on_message(message, time.monotonic())
        return False

    def _take(self, link: TcpLink, body: Sequence[zmq.Frame], now: float) -> None:
        """Process one message from a link's peer."""
        if link.over.is_set():
            return
        try:
            packet = decode([part.buffer for part in body], self._options)
            check_order(packet, link.num_received)
        except FrameError as problem:
            self.fail(link, f"bad frame from {link.address}: {problem}")
            return
        link.liveness.received(now)
        link.received_progress = packet.progress
        if packet.kind is FrameKind.DATA:
            link.num_received += 1
            if link.close_reason is None:  # frames that arrive after close() are dropped
                link.inbox.deliver(Frame(packet.header, packet.parts))
        elif packet.kind is FrameKind.BYE:
            self._take_bye(link, reason_of(packet.header))

    def _take_bye(self, link: TcpLink, reason: str) -> None:
        with self._lock:
            if link.close_reason is None:
                self._fail(link, reason)  # answers with the same reason
                return
            if not link.has_sent_bye:  # both ends close at once, and the peer waits for an answer
                self._send_bye(link, link.close_reason)
                self._linger = FLUSH_SECONDS
            self._finish(link, link.close_reason)

    def _tend(self, now: float, *, is_dry: bool) -> None:
        """Send heartbeats; end links that have been closing or silent for too long."""
        with self._lock:
            self._tend_at = now + self._options.beat_every
            for link in tuple(self._links):
                if link.close_reason is not None:
                    self._tend_closing(link, link.close_reason, now)
                elif is_dry and link.liveness.is_dead(now, partial(self._machine_answers, link)):
                    self._fail(link, f"nothing received from {link.address} for {link.liveness.silent_for(now):.1f} s")
                else:
                    self._try_send(link, encode(FrameKind.BEAT, seq=link.num_sent, progress=link.progress))
        self._on_tick(now)

    def _machine_answers(self, link: TcpLink) -> bool | None:
        """Return whether the machine at the other end acknowledges packets, or None if that is unknown."""
        try:
            with duplicate(self._descriptor_of(link)) as connection:
                return machine_answers(connection, self._options.dead_after - 2 * self._options.beat_every)
        except OSError:
            return None

    def _tend_closing(self, link: TcpLink, close_reason: str, now: float) -> None:
        if now >= link.close_by:
            self._finish(link, close_reason)
        elif not link.has_sent_bye and not self._send_bye(link, close_reason):
            link.has_sent_bye = False
            self._tend_at = now + _RETRY_SECONDS

    def _pump_all(self) -> None:
        while True:
            with self._lock:
                if not self._to_pump:
                    return
                link = self._to_pump.popleft()
            link.inbox.pump()

    def _shut(self) -> None:
        with self._lock:
            for link in tuple(self._links):
                self._finish(link, f"the network thread of {link.address} stopped")
            self._is_stopped = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(int(self._linger * 1000))  # the time to send queued messages
            os.close(self._wake_out)
            os.close(self._wake_in)
        self._pump_all()


class ConnectorHub(Hub):
    """The hub of one connection: a DEALER and its one link. The socket, the thread and the link end together."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], options: LinkOptions, peer: str) -> None:
        super().__init__(socket, monitor, options, f"to {peer}")
        self._descriptor = -1  # until the first message
        self.link = TcpLink(self, peer, (), options)
        self._links.add(self.link)
        self._is_lost = False

    def _on_finished(self, link: TcpLink) -> None:
        self._is_stopping = True

    def _descriptor_of(self, link: TcpLink) -> int:
        return self._descriptor

    def _drop(self, link: TcpLink) -> None:
        self._linger = 0.0  # the thread closes the socket when it ends

    def _settle(self) -> None:
        self._thread.join(FLUSH_SECONDS)

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        self._is_lost = self._is_lost or event == zmq.Event.DISCONNECTED

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        if self._descriptor < 0:
            self._descriptor = source_of(message)
        self._take(self.link, message, now)

    def _on_dry(self) -> None:
        if self._is_lost:
            with self._lock:
                self._finish(self.link, f"connection to {self.link.address} lost")
