"""The I/O thread behind tcp://: one hub serves one zmq socket and every link on it.

Only one thread at a time may use a zmq socket, so all use of it happens under the hub's lock, and only the hub's thread
receives. The thread sleeps in poll() on three descriptors: the socket's, its monitor's (which reports connections made
and lost), and a pipe to wake it. The descriptor of a zmq socket is *edge-triggered*: any call on the socket may swallow
the signal for a message that has arrived. Hence the rule: a thread that has used the socket reads EVENTS before it
releases the lock, and wakes the hub's thread (or does not go to sleep) if something can be read.

`send` runs in the caller's thread up to zmq's queue, without a change of threads; the network thread is zmq's own.
Decoding and sinks run in the hub's thread without the lock, so that checking a large payload delays no sender.

**A reader that waits in recv() runs the hub's loop.** To pass a frame from one thread to another costs a wake-up more
than ZeroMQ alone, half of a short round trip. So a reader that finds no frame runs the loop itself (`drive`), and the
thread stands by: it takes the loop back when no reader has run it for a while, or when there is other work. One thread
runs the loop at a time, under `_loop_lock`; a thread that fails to get that lock changes nothing. Only a hub with
one link lends its loop, so that no reader has to wait for another's sink.

Each iteration reads the monitor if it has events, reads the socket until it is empty, and only then acts on connections
that the monitor reported as lost and on silence. Frames that arrived before an end are thus delivered before it, and a
loop that was held up for seconds finds the heartbeats that arrived meanwhile.

The end of a link: `leave` (polite) has the thread send BYE and waits for the peer's BYE, which proves that everything
sent before was received; `_finish` puts the reason into the inbox, once. All links of a hub end before its socket
closes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from transports import threads
from transports.base import FLUSH_SECONDS, Frame, FrameError, LinkClosed, LinkOptions
from transports.framing import Kind, Packet, decode, encode, reason_bytes
from transports.tcp_link import RETRY_SECONDS, Message, TcpLink
from transports.zmq_socket import ZmqSocket

_MESSAGES_PER_ROUND = 256  # so that a flood cannot keep the thread from its other work
_STAND_BY_SECONDS = 0.05  # without a reader, after which the thread takes the loop back


class Hub:
    """The thread, and what the hubs of connecting and listening sockets have in common."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], options: LinkOptions, name: str) -> None:
        self._socket = ZmqSocket(socket, monitor)
        self._options = options
        self._lock = threading.Lock()
        self._loop_lock = threading.Lock()  # held by the thread that runs the loop; to be taken before _lock
        self._is_lent = False  # a reader runs the loop, or did just now
        self._driven_at = -math.inf
        self._has_work = threading.Event()  # wakes the thread that stands by
        self._links: set[TcpLink] = set()
        self._to_pump: deque[TcpLink] = deque()
        self._tend_at = 0.0
        self._is_stopping = False
        self._is_stopped = False
        self._linger = 0.0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        # One for the thread and one for the reader: two threads may not use a poll object at a time.
        self._poll, self._reader_poll = select.poll(), select.poll()
        for poll in (self._poll, self._reader_poll):
            for descriptor in (self._socket.descriptor, self._socket.monitor_descriptor, self._wake_out):
                poll.register(descriptor, select.POLLIN)
        self._thread = threads.make(self._run, f"transports {name}")

    # -- called from any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def post(self, link: TcpLink, message: Message) -> bool:
        """Pass a DATA packet to zmq. False when its queue is full. Raises LinkClosed."""
        with self._lock:
            if link.over.is_set() or link.close_reason is not None:
                raise link.closed or LinkClosed(link.close_reason or "")
            if not self._try_send(link, message):
                return False
            if link.over.is_set():
                raise link.closed or LinkClosed("")
            link.num_sent += 1
            # A reader reads EVENTS before it sleeps; a thread that sleeps already has to be woken.
            if (not self._is_lent or self._loop_lock.locked()) and self._socket.has_input():
                self._interrupt_poll()
        return True

    def drive(self, link: TcpLink, until: float) -> None:
        """Run the hub's loop in the reader's thread until `link` has something to read, or until the time `until`.

        Returns at once if another thread runs it.
        """
        if not self._loop_lock.acquire(blocking=False):
            return
        try:
            is_over = False
            while not is_over and not link.inbox.is_readable and self._may_drive(link):
                left = until - time.monotonic()
                self._attend_as_reader(link, self._wait(self._reader_poll, max(0.0, left)))
                is_over = left <= 0
        finally:
            self._driven_at = time.monotonic() if self._may_drive(link) else -math.inf
            self._loop_lock.release()
            if self._is_stopping:
                with self._lock:
                    self._wake()

    def _attend_as_reader(self, link: TcpLink, ready: list[int]) -> None:
        try:
            self._attend(ready, link)
        except BaseException:  # Ctrl-C, in the main thread: a frame may have been received and lost
            self.fail(link, "the reader was interrupted")
            raise

    def _may_drive(self, link: TcpLink) -> bool:
        return not self._is_stopping and len(self._links) == 1 and link in self._links

    def pump(self, link: TcpLink) -> None:
        """Have the hub's thread empty the link's inbox into its sink; do it here if the thread has ended."""
        with self._lock:
            if not self._is_stopped:
                self._to_pump.append(link)
                self._wake()
                return
        link.inbox.pump()

    def leave(self, link: TcpLink, reason: str) -> None:
        """Send BYE after all frames, wait for the answer (unless called by a sink), end the link."""
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
        """Have the thread that runs the loop look for work."""
        self._interrupt_poll()
        self._has_work.set()

    def _interrupt_poll(self) -> None:
        """Wake the thread that sleeps in poll()."""
        if not self._is_stopped:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
                os.write(self._wake_in, b"\0")

    def _try_send(self, link: TcpLink, message: Message) -> bool:
        """Whether zmq took the message. If the peer is gone, the link ends, and that counts as taken."""
        try:
            return self._socket.send(link.route, message)
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            self._finish(link, f"connection to {link.address} lost")
            return True

    def _send_bye(self, link: TcpLink, reason: str) -> bool:
        link.has_sent_bye = True
        bye = encode(Kind.BYE, seq=link.num_sent, progress=link.progress, header=reason_bytes(reason))
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
        """A link has ended; its connection is still there. With the lock held."""
        raise NotImplementedError

    def _drop(self, link: TcpLink) -> None:
        """End the link's connection now and drop what is queued on it. With the lock held."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait, in the caller's thread and bounded, until a link that ended politely has freed its resources."""

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        raise NotImplementedError

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        raise NotImplementedError

    def _on_dry(self) -> None:
        """All input is read: connections reported as lost may now end their links."""
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        """Called about every `beat_every` seconds."""

    def _is_idle(self) -> bool:
        """Whether nothing needs a timer, so that the thread may sleep until something happens."""
        return not self._links

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._loop_lock:
                self._read_monitor()  # the calls that opened the socket may have swallowed its signals
                self._iterate()
            while not self._is_stopping:
                if self._is_lent:
                    self._stand_by()
                else:
                    self._iterate_after_poll()
        finally:
            self._interrupt_poll()  # a reader may sleep in it
            with self._loop_lock:
                self._shut()

    def _iterate_after_poll(self) -> None:
        ready = self._wait(self._poll, math.inf)
        if not self._loop_lock.acquire(blocking=False):
            self._is_lent = True
            return
        try:
            self._attend(ready)
        finally:
            self._loop_lock.release()

    def _stand_by(self) -> None:
        was_told = self._has_work.wait(_STAND_BY_SECONDS)
        self._has_work.clear()
        if self._loop_lock.locked():
            return  # by a reader, which was woken, too
        if was_told or time.monotonic() - self._driven_at >= _STAND_BY_SECONDS:
            self._is_lent = False

    def _wait(self, poll: select.poll, seconds: float) -> list[int]:
        """Sleep until something happens, at most `seconds`; the descriptors that are ready."""
        with self._lock:
            if self._to_pump or self._is_stopping or self._socket.has_input():
                return []
            if not self._is_idle():
                seconds = min(seconds, max(0.0, self._tend_at - time.monotonic()))
        wait = None if seconds == math.inf else math.ceil(seconds * 1000)
        return [descriptor for descriptor, _ in poll.poll(wait)]

    def _attend(self, ready: list[int], reader: TcpLink | None = None) -> None:
        if self._wake_out in ready:
            with contextlib.suppress(BlockingIOError):  # the other thread that polls it may have read it since
                os.read(self._wake_out, 4096)
        if self._socket.monitor_descriptor in ready:  # edge-triggered too, but always read until it is dry
            self._read_monitor()
        self._iterate(reader)

    def _iterate(self, reader: TcpLink | None = None) -> None:
        is_dry = self._read_socket(reader)
        now = time.monotonic()
        if is_dry:
            self._on_dry()
        if now >= self._tend_at:
            self._tend(now, is_dry=is_dry)
        if self._to_pump:
            self._pump_all()

    def _read_monitor(self) -> None:
        for event, descriptor in self._socket.events():
            self._on_monitor(event, descriptor)

    def _read_socket(self, reader: TcpLink | None) -> bool:
        """Receive until nothing is left (True), or until `reader` can read something or the round is over (False)."""
        for _ in range(_MESSAGES_PER_ROUND):
            with self._lock:
                if not self._socket.has_input():  # cheaper than an exception
                    return True
                message = self._socket.receive()
            self._on_message(message, time.monotonic())
            if reader is not None and reader.inbox.is_readable:
                return False
        return False

    def _take(self, link: TcpLink, body: Sequence[zmq.Frame], now: float) -> None:
        """Process one message from a link's peer."""
        if link.over.is_set():
            return
        try:
            packet = decode([part.buffer for part in body], self._options)
            link.sequencer.admit(packet)
            if packet.kind in (Kind.OPEN, Kind.ACCEPT):
                raise FrameError(f"{packet.kind.name} on an open link")
        except FrameError as problem:
            self.fail(link, f"bad frame from {link.address}: {problem}")
            return
        link.liveness.received(now)
        link.received_progress = packet.progress
        if packet.kind is Kind.DATA:
            self._take_data(link, packet)
        elif packet.kind is Kind.BYE:
            self._take_bye(link, packet.reason)

    def _take_data(self, link: TcpLink, packet: Packet) -> None:
        if link.close_reason is not None:  # frames that arrive after close() are dropped
            return
        frame = Frame(packet.header, packet.parts)
        if link.inbox.put(frame, frame.num_bytes):
            link.inbox.pump()
        else:
            self.fail(link, f"more than {self._options.max_waiting_bytes} bytes from {link.address} wait unread")

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
        """Send heartbeats; end links that are closing for too long, or silent."""
        with self._lock:
            self._tend_at = now + self._options.beat_every
            for link in tuple(self._links):
                if link.close_reason is not None:
                    self._tend_closing(link, link.close_reason, now)
                elif is_dry and link.liveness.is_dead(now):
                    self._fail(link, f"nothing received from {link.address} for {link.liveness.silent_for(now):.1f} s")
                else:
                    self._try_send(link, encode(Kind.BEAT, seq=link.num_sent, progress=link.progress))
        self._on_tick(now)

    def _tend_closing(self, link: TcpLink, close_reason: str, now: float) -> None:
        if now >= link.close_by:
            self._finish(link, close_reason)
        elif not link.has_sent_bye and not self._send_bye(link, close_reason):
            link.has_sent_bye = False
            self._tend_at = now + RETRY_SECONDS

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
            self._socket.close(self._linger)
            os.close(self._wake_out)
            os.close(self._wake_in)
        self._pump_all()
