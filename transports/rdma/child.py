"""`python -m transports.rdma.child CHANNEL SEGMENT`: the process that is a member of a group.

`child_process` starts it, with two inherited descriptors, and sends its JOB. It joins the group, adds one number with
the peer (the first message of a new JACCL group was seen to be lost, which a sum before it prevents) and sends READY.
Then, until it ends, rank 0 sends the chunks that it finds in the segment, and rank 1 writes the chunks that it receives
to the segment. One thread does this, one operation at a time, and evaluates each before it makes the next: MLX sends
and receives in the order of evaluation. Checksums are computed here and take none of the engine's time.

**The end.** When its parent is gone or has closed the channel, rank 0 sends one more message, which says that nothing
follows. Rank 1 reads and discards messages until that one comes: a process that is killed within a receive of JACCL
leaves memory wired until a restart (mlx#3910). A child never outlives its parent by more than LEAVE_SECONDS. Its
standard input is a pipe that no process writes to; when it closes, a second thread ends the process, even while the
first one waits. That thread cannot run while a group is being joined, as MLX then holds the GIL and waits without
limit. So an alarm is set, whose default action needs no Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket as sockets
import sys
import threading
import time
from typing import NoReturn

import mlx.core as mx

from transports.base import FrameError
from transports.emulation import emulator
from transports.rdma.channel import (
    LEAVE_SECONDS,
    Channel,
    ChannelClosedError,
    ChannelRecord,
    ChannelWord,
    Job,
    Segment,
    Slots,
)
from transports.rdma.joining import check_sum, join_group
from transports.rdma.messages import (
    CHUNK_MESSAGES,
    HEAD_BYTES,
    MESSAGE_BYTES,
    ROOM_BYTES,
    Head,
    num_messages,
    seal,
    unseal,
)
from transports.rdma.probe import emulated

_CACHE_BYTES = 16 << 20


class Child:
    def __init__(self, channel: Channel, segment: Segment) -> None:
        self._channel = channel
        self._segment = segment
        self._job: Job
        self._group: mx.distributed.Group
        self._num_messages = 0
        self._is_resting = True  # both ends begin at rest
        self._num_wakes = 0
        self._slots = Slots()
        self._chunk: tuple[int, int] | None = None  # the chunk being received: its offset and its bytes so far
        self._is_alone = False  # the parent is gone

    def run(self) -> NoReturn:
        self._job = job = Job(**json.loads(self._expect(ChannelWord.JOB).text))
        signal.alarm(job.join_seconds)
        self._group = join_group(job.backend, job.rank, job.device, "", job.host, self._gather)
        check_sum(self._group, job.rank)
        signal.alarm(0)
        threading.Thread(target=self._watch_parent, daemon=True).start()
        self._channel.send(ChannelWord.READY)
        if job.rank == 0:
            self._write()
        self._read()

    def _expect(self, word: ChannelWord) -> ChannelRecord:
        record = self._next()
        if record.word is not word:
            raise FrameError(f"{record.word.name} came instead of {word.name}")
        return record

    def _next(self) -> ChannelRecord:
        record = self._channel.recv()
        assert record is not None
        return record

    def _watch_parent(self) -> None:
        poll = select.poll()
        poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        poll.poll()
        time.sleep(LEAVE_SECONDS)  # usually the first thread notices, too, and ends the process before
        os._exit(0)

    def _gather(self, mine: bytes) -> bytes:
        """Exchange bytes with the peer through the two parents. Return the data of both, in the order of ranks."""
        self._channel.send(ChannelWord.GATHER, text=mine)
        return self._expect(ChannelWord.GATHERED).text

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _write(self) -> NoReturn:
        try:
            while True:
                record = self._channel.recv(None if self._is_resting else self._job.rest_seconds)
                if record is None:
                    self._rest()
                else:
                    self._send_chunk(record)
        except ChannelClosedError:
            with contextlib.suppress(RuntimeError):  # ring notices a peer that is gone
                self._rest()
            raise

    def _send_chunk(self, record: ChannelRecord) -> None:
        """Send the content of a record: messages, each with its head."""
        ends_frame = record.size < CHUNK_MESSAGES * ROOM_BYTES  # a full chunk may be followed by more
        rests = ends_frame and self._job.rest_seconds == 0
        offset, left = record.offset, record.size
        if self._is_resting:
            self._channel.send(ChannelWord.ROUSE)
        for num_next in reversed(range(num_messages(left))):
            head = Head(min(left, ROOM_BYTES), num_next, rests and num_next == 0)
            self._send(self._segment.view[offset : offset + MESSAGE_BYTES], head)
            offset += MESSAGE_BYTES
            left -= ROOM_BYTES
        self._channel.send(ChannelWord.CONSUMED)

    def _rest(self) -> None:
        """Let the reader sleep, unless it sleeps already."""
        if not self._is_resting:
            self._send(memoryview(bytearray(MESSAGE_BYTES)), Head(0, rests=True))

    def _send(self, message: memoryview, head: Head) -> None:
        seal(message, head, nonce=self._job.nonce, seq=self._num_messages)
        self._num_messages += 1
        self._is_resting = head.rests
        array = mx.array(message)  # type: ignore[arg-type]  # copies any buffer
        mx.eval(mx.distributed.send(array, 1, group=self._group, stream=mx.cpu))

    # -- rank 1 ------------------------------------------------------------------------------------------------------

    def _read(self) -> NoReturn:
        while True:
            if self._is_resting:
                while self._num_wakes == 0:  # every rest has one, and it may arrive before the rest is announced
                    self._on_record()
                self._num_wakes -= 1
            message = mx.distributed.recv((MESSAGE_BYTES,), mx.uint8, 0, group=self._group, stream=mx.cpu)
            mx.eval(message)
            view = memoryview(message)  # type: ignore[arg-type]
            head = unseal(view, nonce=self._job.nonce, seq=self._num_messages)
            self._num_messages += 1
            self._is_resting = head.rests
            if head.num_used > 0 and not self._is_alone:
                try:
                    self._keep(view[HEAD_BYTES : HEAD_BYTES + head.num_used], head.num_next)
                except ChannelClosedError:
                    self._is_alone = True  # read on until the peer rests

    def _keep(self, content: memoryview, num_next: int) -> None:
        """Write to the segment; tell the parent when the chunk is complete."""
        offset, size = self._chunk or (self._take_slot(), 0)
        self._segment.view[offset + size : offset + size + content.nbytes] = content
        self._chunk = (offset, size + content.nbytes)
        if num_next == 0:
            self._channel.send(ChannelWord.GOT, *self._chunk)
            self._chunk = None

    def _take_slot(self) -> int:
        while (offset := self._slots.take()) is None:
            self._on_record()
        return offset

    def _on_record(self) -> None:
        if self._next().word is ChannelWord.WAKE:
            self._num_wakes += 1
        else:
            self._slots.consumed()


def main(channel: Channel, segment: Segment) -> int:
    try:
        Child(channel, segment).run()
    except ChannelClosedError:
        return 0
    except Exception as problem:  # noqa: BLE001 - any error ends the parent's link
        text = f"{type(problem).__name__}: {problem}" if not isinstance(problem, FrameError) else str(problem)
        with contextlib.suppress(ChannelClosedError):
            channel.send(ChannelWord.FAILED, text=text.encode()[:1000])
        return 1


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(_CACHE_BYTES)
    if (world := emulated()) is not None:  # in tests, away from Macs
        emulator("jaccl.group").install(world)
    code = main(Channel(sockets.socket(fileno=int(sys.argv[1]))), Segment(int(sys.argv[2])))
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end waits for MLX's threads, and stops the one that would end this process
