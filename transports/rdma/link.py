"""A link over two paths: the group for frames from the connector, the control link for everything else.

One thread per link reads from the child: chunks from the group (listener), notes of free room (connector). Only this
thread ends the child. The hub's thread delivers the frames of the control link. Either thread may end the inbox.

A frame of the control link begins with one byte, the tag:

    D  a frame, listener -> connector             A + u64  bytes received over the group, listener -> connector
    W  wake your child, connector -> listener

Acknowledgements show that the group makes progress: if bytes were sent and no more of them arrive for `dead_after`, the
group is dead, even if the control link is not. A child that waits in a receive uses a whole core. So a writer that has
had nothing to send for a while announces a rest, and its end sends W before the next frame.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from transports import threads
from transports.base import FLUSH_SECONDS, Buffer, Frame, FrameError, Link, LinkClosed, LinkOptions
from transports.framing import FrameKind, Liveness, check_bounds, flatten, reason_bytes, reason_of
from transports.inbox import InboxLink
from transports.rdma.channel import ChannelClosedError, ChannelRecord, ChannelWord
from transports.rdma.child_process import ChildProcess
from transports.rdma.messages import MAX_STEP_BYTES, Assembly, pack_table, unpack_table

_DATA, _ACK, _WAKE = b"D", b"A", b"W"
_COUNT = struct.Struct("<Q")


def control_options(options: LinkOptions) -> LinkOptions:
    """Return the options of the control link: its headers have a tag in addition, and it carries the handshake."""
    return replace(options, max_header_bytes=max(options.max_header_bytes + 1, MAX_STEP_BYTES))


class RdmaLink(InboxLink):
    """One end of an rdma link.

    Args:
        child: has joined the group. The child of rank 0, the connecting end, writes.
        on_end: called when the child has ended.
    """

    def __init__(
        self,
        address: str,
        control: Link,
        child: ChildProcess,
        options: LinkOptions,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(address, control, options)
        self.peer_key = control.peer_key
        self._control = control
        self._process = child
        self._is_writer = child.job.rank == 0
        self._on_end = on_end
        self._close_by = float("inf")
        # Used by senders.
        self._writing = threading.Lock()  # one frame at a time
        self._bytes_posted = 0
        self._bytes_acked = 0
        # Used by the thread.
        now = time.monotonic()
        self._group = Liveness(options, now)
        self._tend_at = now + options.beat_every
        self._incoming: Assembly | None = None
        self._bytes_received = 0
        self._bytes_reported = 0
        self._thread = threads.make(self._run, f"transports rdma {address}")
        self._thread.start()
        control.deliver_to(self._on_control)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        if (over := self._ended) is not None:
            raise over
        flat = flatten(frame, self._options)
        if self._is_writer:
            self._post(FrameKind.DATA, [flat.header, *flat.parts], self._options.silent_after)
        else:
            try:
                self._control.send(Frame(_DATA + flat.header, flat.parts))
            except LinkClosed as ending:
                raise self._ended or ending from None

    def _post(self, kind: FrameKind, pieces: Sequence[Buffer], patience: float) -> None:
        """Send a frame, or the end, over the group. Raises LinkClosed."""
        give_up_at = time.monotonic() + patience
        if not self._writing.acquire(timeout=patience):
            return  # only a BYE can come while another frame waits for room
        try:
            if (over := self._ended if kind is FrameKind.DATA else self.inbox.ended) is not None:
                raise over
            table = pack_table(kind, [memoryview(piece).nbytes for piece in pieces])
            left = max(0.0, give_up_at - time.monotonic())
            self._bytes_posted += self._process.post([table, *pieces], left)
            return
        except LinkClosed as ending:
            raise self.inbox.ended or ending from None
        except TimeoutError:
            trouble = f"{self.address} took nothing for {patience:g} s: queue full"
        except ChannelClosedError as problem:
            trouble = f"the transport process of {self.address} is gone: {problem}"
        finally:
            self._writing.release()
        self._fail(trouble)
        raise self.inbox.ended or LinkClosed(trouble)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_control(self, item: Frame | LinkClosed) -> None:
        """Handle an item of the control link, on its hub's thread."""
        if isinstance(item, LinkClosed):
            self._finish(self._reason_of(item))
            return
        tag, header = item.header[:1], item.header[1:]
        if tag == _DATA and self._is_writer and len(header) <= self._options.max_header_bytes:
            self._take(Frame(header, item.parts))
        elif tag == _ACK and self._is_writer and len(header) == _COUNT.size:
            self._bytes_acked = _COUNT.unpack(header)[0]
        elif tag == _WAKE and not self._is_writer and not header:
            with contextlib.suppress(ChannelClosedError):  # the thread will notice
                self._process.channel.send(ChannelWord.WAKE)
        else:
            self._fail(f"bad message from {self.address} on the control link")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._iterate()
        except ChannelClosedError:
            if not self._over.is_set():
                summary = self._process.exit_summary()
                self._fail(f"the transport process of the link to {self.address} ended ({summary})")
        except FrameError as problem:
            self._fail(f"bad frame from {self.address}: {problem}")
        finally:
            self._finish(f"the thread of {self.address} stopped")
            self._process.end()
            self._on_end()

    def _iterate(self) -> None:
        record = self._process.channel.recv(max(0.0, self._tend_at - time.monotonic()))
        now = time.monotonic()
        if record is not None:
            self._on_record(record)
        if now >= self._tend_at:
            self._tend(now)

    def _on_record(self, record: ChannelRecord) -> None:
        if record.word is ChannelWord.CONSUMED:
            self._process.consumed()
        elif record.word is ChannelWord.GOT:
            self._on_chunk(self._process.segment.view[record.offset : record.offset + record.size])
        elif record.word is ChannelWord.ROUSE:
            self._send_tagged(_WAKE)
        elif record.word is ChannelWord.FAILED:
            self._fail(f"the group with {self.address} failed: {record.text.decode('utf-8', 'replace')}")

    def _on_chunk(self, content: memoryview) -> None:
        """Process a chunk that has arrived. Raises FrameError."""
        with content:
            self._bytes_received += content.nbytes
            if self._incoming is not None:
                self._incoming.add(content)
            else:
                kind, lengths = unpack_table(content)
                check_bounds(lengths[0], lengths[1:], self._options)  # before memory is allocated for them
                self._incoming = Assembly(kind, lengths, content)
        with contextlib.suppress(ChannelClosedError):  # the child has ended, but its earlier records must still be read
            self._process.channel.send(ChannelWord.CONSUMED)
        if self._incoming.is_whole:
            whole, self._incoming = self._incoming, None
            self._on_frame(whole)

    def _on_frame(self, whole: Assembly) -> None:
        header, *parts = whole.pieces
        if whole.kind is FrameKind.DATA:
            self._take(Frame(bytes(header), tuple(parts)))
            return
        reason = reason_of(header)  # the peer has closed the link, and all that it sent has arrived
        self.inbox.end(reason)
        self._control.close(reason)
        self._finish(reason)

    def _tend(self, now: float) -> None:
        self._tend_at = now + self._options.beat_every
        if self._is_writer:
            self._check_group(now)
        elif self._bytes_reported != self._bytes_received:
            self._bytes_reported = self._bytes_received
            self._send_tagged(_ACK + _COUNT.pack(self._bytes_received))
        if now >= self._close_by and self._close_reason is not None:
            self._finish(self._close_reason)
            self._control.abort(self._close_reason)

    def _send_tagged(self, header: bytes) -> None:
        with contextlib.suppress(LinkClosed):  # the sink was called for that, or is about to be
            self._control.send(Frame(header))

    def _check_group(self, now: float) -> None:
        is_moving = self._bytes_reported != self._bytes_acked or self._bytes_acked >= self._bytes_posted
        if is_moving or self._control.silent_for > 2 * self._options.beat_every:  # silence ends the control link anyway
            self._bytes_reported = self._bytes_acked
            self._group.received(now)
        elif self._group.is_dead(now):
            seconds = self._group.silent_for(now)
            self._fail(f"nothing arrived at {self.address} for {seconds:.1f} s, though its control link is alive")

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        if (ending := self.inbox.ended) is not None:
            reason = ending.reason  # the peer may not know it yet, and would take `reason` for it
        with self._state:
            is_first = self._close_reason is None and not self._over.is_set()
            if is_first:
                self._close_reason = reason
                self._close_by = time.monotonic() + FLUSH_SECONDS
        is_in_sink = self._sink_thread == threading.get_ident()
        if is_first and is_in_sink and not self._is_writer:  # a sink must not wait
            threads.make(self._send_bye, f"transports closes {self.address}", reason).start()
        elif is_first:
            self._send_bye(reason)
        if is_in_sink:
            return  # the answer arrives, or the thread ends the link when it is late
        if not self._over.wait(max(0.0, self._close_by - time.monotonic())):
            self._finish(reason)
            self._control.abort(reason)  # frames in flight are dropped, so the peer must not see a complete end
        if threading.current_thread() is not self._thread:
            self._thread.join(FLUSH_SECONDS)

    def _send_bye(self, reason: str) -> None:
        """Send the end after the last frame, on the same path. A reader of the group answers by closing the control
        link."""
        if not self._is_writer:
            self._control.close(reason)
            return
        with contextlib.suppress(LinkClosed):
            self._post(FrameKind.BYE, [reason_bytes(reason)], FLUSH_SECONDS)

    def abort(self, reason: str = "") -> None:
        if (ending := self.inbox.ended) is not None:
            reason = ending.reason
        self.inbox.end(reason, drop=True)
        self._control.abort(reason)
        self._finish(reason)

    def _fail(self, reason: str) -> None:
        # If the peer ended the link, what the group does after that is a consequence: the control link has the reason,
        # although its hub may not have handed it over yet.
        if (ending := self._control.closed) is not None:
            reason = self._reason_of(ending)
        self.inbox.end(reason)
        self._control.close(reason)  # first, or the peer could take the last message of the group for the reason
        self._finish(reason)

    def _reason_of(self, ending: LinkClosed) -> str:
        """Return why the link is over: this end's reason if it closed the link, else the control link's."""
        return ending.reason if self._close_reason is None else self._close_reason

    def _finish(self, reason: str) -> None:
        self.inbox.end(reason)
        self._over.set()
        self._process.disconnect()
        self.inbox.pump()
