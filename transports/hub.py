"""The I/O thread behind tcp://: one hub serves one zmq socket and every link on it.

A zmq socket belongs to one thread at a time, so all use of it happens under the hub's lock, and only the hub's thread
receives. The thread sleeps in poll() on three descriptors: the socket's, its monitor's (which tells of connections made
and lost), and a pipe to wake it. The descriptor of a zmq socket is *edge-triggered*: any call on the socket may swallow
the signal for a message that has come. Hence the rule: whoever used the socket looks at EVENTS before letting go of the
lock, and wakes the thread (or does not go to sleep) when something can be read.

`send` runs in the caller's thread up to zmq's queue: no hand-over, the network thread is zmq's own. Decoding and sinks
run in the hub's thread without the lock, so that checking a large payload delays no sender.

**Who waits in recv() is the hub's thread meanwhile.** A thread that hands a frame to another costs a wake-up more than
ZeroMQ alone, half of a short round trip. So a reader that finds nothing takes the thread's turns itself (`drive`), and
the thread stands by: it takes them back when nobody has read for a while, or when it is told that there is something
to do. One thread turns at a time, under `_turns`; whoever fails to get that leaves everything as it is. Only a hub with
one link lends its turns, so that no reader has to wait for another's sink.

Each time round: read the monitor if it has news, read the socket until it is dry, and only then believe what the
monitor said about lost connections and what the clock says about silence. Frames that came before an end are thus
delivered before it, and a loop that was held up for seconds finds the heartbeats that arrived meanwhile.

The end of a link: `leave` (polite) lets the thread send BYE and waits for the peer's BYE, which proves that everything
sent before was received; `finish` puts the reason into the inbox, once. All links of a hub end before its socket
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

from transports.base import FLUSH_SECONDS, Frame, FrameError, LinkClosed, LinkOptions
from transports.framing import Kind, Packet, decode, encode, reason_bytes
from transports.tcp_link import RETRY_SECONDS, Message, TcpLink
from transports.zmq_socket import ZmqSocket

_MESSAGES_PER_TURN = 256  # so that a flood cannot keep the thread from its other duties
_STAND_BY_SECONDS = 0.05  # without a reader after which the thread takes its turns back


class Hub:
    """The thread and the rules that connecting and listening sockets share."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], options: LinkOptions, name: str) -> None:
        self._socket = ZmqSocket(socket, monitor)
        self._options = options
        self._lock = threading.Lock()
        self._turns = threading.Lock()  # held by whoever reads the socket and tends the links; comes before _lock
        self._is_lent = False  # a reader has the turns, or had them just now
        self._driven_at = -math.inf
        self._told = threading.Event()  # something to do for the thread that stands by
        self._links: set[TcpLink] = set()
        self._to_pump: deque[TcpLink] = deque()
        self._tend_at = 0.0
        self._is_stopping = False
        self._is_stopped = False
        self._linger = 0.0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        # One for the thread and one for the reader: two threads may not be in one of them at a time.
        self._poll, self._reader_poll = select.poll(), select.poll()
        for poll in (self._poll, self._reader_poll):
            for descriptor in (self._socket.descriptor, self._socket.monitor_descriptor, self._wake_out):
                poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"transports {name}", daemon=True)

    # -- called from any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def post(self, link: TcpLink, message: Message, num_bytes: int) -> bool:
        """Hand a DATA packet to zmq. False when its queue is full. Raises LinkClosed."""
        with self._lock:
            if link.over.is_set() or link.farewell is not None:
                raise link.closed or LinkClosed(link.farewell or "")
            if not self._try_send(link, message):
                return False
            if link.over.is_set():
                raise link.closed or LinkClosed("")
            link.num_sent += 1
            link.bytes_sent += num_bytes
            # A reader looks at EVENTS before it sleeps; whoever sleeps already has to be woken.
            if (not self._is_lent or self._turns.locked()) and self._socket.has_input():
                self._prod()
        return True

    def drive(self, link: TcpLink, until: float) -> None:
        """Be the hub's thread until `link` has something to read, or `until`, if that can be now. From its reader."""
        if not self._turns.acquire(blocking=False):
            return
        try:
            is_over = False
            while not is_over and not link.inbox.has_news and self._lends_to(link):
                left = until - time.monotonic()
                self._turn_for(link, self._wait(self._reader_poll, max(0.0, left)))
                is_over = left <= 0
        finally:
            self._driven_at = time.monotonic() if self._lends_to(link) else -math.inf
            self._turns.release()
            if self._is_stopping:
                with self._lock:
                    self._wake()

    def _turn_for(self, link: TcpLink, ready: list[int]) -> None:
        try:
            self._attend(ready, link)
        except BaseException:  # Ctrl-C, in the main thread: a frame may have been taken and lost
            self.fail(link, "the reader was interrupted")
            raise

    def _lends_to(self, link: TcpLink) -> bool:
        return not self._is_stopping and len(self._links) == 1 and link in self._links

    def pump(self, link: TcpLink) -> None:
        """Let the thread empty the link's inbox into its sink; do it here if the thread is gone."""
        with self._lock:
            if not self._is_stopped:
                self._to_pump.append(link)
                self._wake()
                return
        link.inbox.pump()

    def leave(self, link: TcpLink, reason: str) -> None:
        """Say BYE after what was sent, wait for the answer (unless called by a sink), end the link."""
        with self._lock:
            if link.farewell is None and not link.over.is_set():
                link.farewell = reason
                link.leave_by = time.monotonic() + FLUSH_SECONDS
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
        """End a link that broke the contract, telling the peer why if it can be told."""
        with self._lock:
            self._fail(link, reason)
            self._wake()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """There is something to do, for whoever has the turns."""
        self._prod()
        self._told.set()

    def _prod(self) -> None:
        """Wake whoever sleeps in poll()."""
        if not self._is_stopped:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
                os.write(self._wake_in, b"\0")

    def _try_send(self, link: TcpLink, message: Message) -> bool:
        """Whether zmq took the message. A peer that is gone ends the link; that counts as taken."""
        try:
            return self._socket.send(link.route, message)
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            self._finish(link, f"connection to {link.address} lost")
            return True

    def _say_bye(self, link: TcpLink, reason: str) -> bool:
        link.has_said_bye = True
        bye = encode(Kind.BYE, seq=link.num_sent, progress=link.progress, header=reason_bytes(reason))
        return self._try_send(link, bye)

    def _fail(self, link: TcpLink, reason: str) -> None:
        if not link.over.is_set():
            self._say_bye(link, reason)
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

    # -- what the two kinds of hub do differently --------------------------------------------------------------------

    def _on_finished(self, link: TcpLink) -> None:
        """A link has ended; its connection is still there. With the lock held."""
        raise NotImplementedError

    def _drop(self, link: TcpLink) -> None:
        """End the link's connection now, with whatever is queued on it. With the lock held."""
        raise NotImplementedError

    def _settle(self) -> None:
        """After a polite end, from the caller's thread: wait (bounded) until what the link used is given back."""

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        raise NotImplementedError

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        raise NotImplementedError

    def _on_dry(self) -> None:
        """All input is read: connections known as lost may now end their links."""
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        """About every `beat_every` seconds."""

    def _is_idle(self) -> bool:
        """Nothing to tend: sleep until something happens."""
        return not self._links

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._turns:
                self._read_monitor()  # first: whoever opened the socket may have swallowed its signals
                self._turn()
            while not self._is_stopping:
                if self._is_lent:
                    self._stand_by()
                else:
                    self._take_a_turn()
        finally:
            self._prod()  # a reader that sleeps
            with self._turns:
                self._shut()

    def _take_a_turn(self) -> None:
        ready = self._wait(self._poll, math.inf)
        if not self._turns.acquire(blocking=False):
            self._is_lent = True
            return
        try:
            self._attend(ready)
        finally:
            self._turns.release()

    def _stand_by(self) -> None:
        was_told = self._told.wait(_STAND_BY_SECONDS)
        self._told.clear()
        if self._turns.locked():
            return  # by a reader, who was woken, too
        if was_told or time.monotonic() - self._driven_at >= _STAND_BY_SECONDS:
            self._is_lent = False

    def _wait(self, poll: select.poll, seconds: float) -> list[int]:
        """Sleep until something happens, for so long at most; the descriptors on which it does."""
        with self._lock:
            if self._to_pump or self._is_stopping or self._socket.has_input():
                return []
            if not self._is_idle():
                seconds = min(seconds, max(0.0, self._tend_at - time.monotonic()))
        wait = None if seconds == math.inf else math.ceil(seconds * 1000)
        return [descriptor for descriptor, _ in poll.poll(wait)]

    def _attend(self, ready: list[int], reader: TcpLink | None = None) -> None:
        if self._wake_out in ready:
            os.read(self._wake_out, 4096)
        if self._socket.monitor_descriptor in ready:  # edge-triggered too, but always read until it is dry
            self._read_monitor()
        self._turn(reader)

    def _turn(self, reader: TcpLink | None = None) -> None:
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
        """Take what has come, or until `reader` has something; True when nothing is left."""
        for _ in range(_MESSAGES_PER_TURN):
            with self._lock:
                if not self._socket.has_input():  # cheaper than to be told by an exception
                    return True
                message = self._socket.receive()
            self._on_message(message, time.monotonic())
            if reader is not None and reader.inbox.has_news:
                return False
        return False

    def _take(self, link: TcpLink, body: Sequence[zmq.Frame], now: float) -> None:
        """One message from a link's peer."""
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
        link.liveness.heard(now)
        link.heard_progress = packet.progress
        if packet.kind is Kind.DATA:
            self._take_data(link, packet)
        elif packet.kind is Kind.BYE:
            self._take_bye(link, packet.reason)

    def _take_data(self, link: TcpLink, packet: Packet) -> None:
        if link.farewell is not None:  # close() was called: what had come by then stays readable, this is too late
            return
        num_bytes = packet.num_bytes
        link.bytes_received += num_bytes
        link.num_received += 1
        if link.inbox.put(Frame(packet.header, packet.parts), num_bytes):
            link.inbox.pump()
        else:
            self.fail(link, f"more than {self._options.max_waiting_bytes} bytes from {link.address} wait unread")

    def _take_bye(self, link: TcpLink, reason: str) -> None:
        with self._lock:
            if link.farewell is None:
                self._fail(link, reason)  # answers with the same words
                return
            if not link.has_said_bye:  # both ends leave at once, and the peer waits for our answer
                self._say_bye(link, link.farewell)
                self._linger = FLUSH_SECONDS
            self._finish(link, link.farewell)

    def _tend(self, now: float, *, is_dry: bool) -> None:
        with self._lock:
            self._tend_at = now + self._options.beat_every
            for link in tuple(self._links):
                if link.farewell is not None:
                    self._tend_leaving(link, link.farewell, now)
                elif is_dry and link.liveness.is_dead(now):
                    self._fail(link, f"nothing heard from {link.address} for {link.liveness.silent_for(now):.1f} s")
                else:
                    self._try_send(link, encode(Kind.BEAT, seq=link.num_sent, progress=link.progress))
        self._on_tick(now)

    def _tend_leaving(self, link: TcpLink, farewell: str, now: float) -> None:
        if now >= link.leave_by:
            self._finish(link, farewell)
        elif not link.has_said_bye and not self._say_bye(link, farewell):
            link.has_said_bye = False
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
