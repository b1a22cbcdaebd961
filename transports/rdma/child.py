"""`python -m transports.rdma.child CHANNEL SEGMENT`: the process that is a member of a group.

`child_process` starts it, with two inherited descriptors. It sends UP, receives its JOB and GO with what its backend
needs, joins the group, adds one number with the peer (the first message of a new JACCL group was seen to be lost, which
a sum before it prevents) and sends READY. Then, until it ends, rank 0 sends messages from the segment, and rank 1
writes messages that it receives to the segment. One thread does this, one operation at a time, each evaluated before
the next is made: MLX sends and receives in the order of evaluation.

It does not outlive its parent by more than `Job.leave_seconds`. Standard input is a pipe that no process writes to;
when it closes, a second thread ends the process, even while the first one waits. That thread also sends ALIVE. It
cannot run while a group is being joined, as MLX then holds the GIL and waits without limit: so an alarm is set, whose
default action needs no Python.

A process that is killed within a receive of JACCL leaves memory wired (`leftovers`). So where there is a device, nobody
stays in one: a writer whose parent is gone announces a last rest before it ends, and a reader whose parent is gone
reads on, to nobody, until that comes. PARK does the same when only the link has ended, and the child then waits for the
next link's nonce (`groups`)."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx

from transports.base import FrameError
from transports.emulated_jaccl.world import World
from transports.rdma import leftovers
from transports.rdma.address import RING
from transports.rdma.channel import Channel, ChannelClosedError, Job, Record, Word
from transports.rdma.messages import FIRST_BYTES, Kind, pack_head, unpack_head
from transports.rdma.segment import SEGMENT_BYTES, Ring, Segment

_CACHE_BYTES = 16 << 20


class Child:
    def __init__(self, channel: Channel, segment: Segment) -> None:
        self._channel = channel
        self._segment = segment
        self._job: Job
        self._group: mx.distributed.Group
        self._is_resting = True  # both ends begin at rest
        self._num_rests = 0  # counted apart from packets, which the parent numbers without knowing of rests
        self._num_wakes = 0
        self._num_packets = 0  # received
        self._num_messages = 0  # sent or received since the group was joined, of all links
        self._is_within_frame = False  # of those to be sent
        self._is_last = False  # the frame that is being sent
        self._is_park_due = False
        self._is_parked = False
        self._is_alone = False  # the parent is gone
        self._ring = Ring(SEGMENT_BYTES)

    def run(self) -> None:
        self._channel.send(Word.UP)
        self._job = Job(**json.loads(self._expect(Word.JOB).text))
        threading.Thread(target=self._watch_parent, daemon=True).start()
        config = json.loads(self._expect(Word.GO).text)
        signal.alarm(self._job.join_seconds)
        self._group = self._join(config)
        self._add_up()
        signal.alarm(0)
        self._channel.send(Word.READY)
        if self._job.rank == 0:
            self._write()
        else:
            self._read()

    def _add_up(self) -> None:
        """Add one number with the peer. Raises FrameError unless that is the sum of two."""
        total = mx.distributed.all_sum(mx.array([self._job.rank + 1.0]), group=self._group, stream=mx.cpu)
        if self._group.size() != 2 or total.item() != 3.0:
            raise FrameError(f"a group of {self._group.size()} adds up to {total.item()}, not two to 3")

    def _expect(self, word: Word) -> Record:
        record = self._channel.recv(None)
        assert record is not None
        if record.word is not word:
            raise FrameError(f"{record.word.name} in place of {word.name}")
        return record

    def _watch_parent(self) -> None:
        poll = select.poll()
        poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while not poll.poll(self._job.alive_every * 1000):
            if self._is_parked:  # nobody reads
                continue
            try:
                self._channel.send(Word.ALIVE)
            except ChannelClosedError:  # the parent is ending this process; the first thread will notice
                continue
        time.sleep(self._job.leave_seconds)  # the first thread ends the process sooner, unless it waits in the group
        if self._job.device:
            leftovers.record(self._job.device, os.getpid())
        os._exit(0)

    # -- between two links -------------------------------------------------------------------------------------------

    def _park(self) -> None:
        """Wait for the next link on this group. Both ends rest, and all messages of this one were consumed or are being
        consumed."""
        self._is_parked, self._is_park_due = True, False
        self._channel.send(Word.PARKED, size=self._num_messages)
        while (record := self._channel.recv(None)) is not None and record.word is not Word.RENEW:
            self._on_record(record)
        assert record is not None
        self._job = replace(self._job, **json.loads(record.text))
        self._num_rests = self._num_wakes = self._num_packets = 0
        self._is_parked = False
        self._add_up()
        self._channel.send(Word.READY)

    # -- joining -----------------------------------------------------------------------------------------------------

    def _join(self, config: dict[str, Any]) -> mx.distributed.Group:
        """`config`: for ring, the two `hosts`; for JACCL, the own `device`."""
        os.environ["MLX_RANK"] = str(self._job.rank)
        if self._job.backend == RING:
            with _file([[host] for host in config["hosts"]]) as file:
                os.environ["MLX_HOSTFILE"] = file.name
                return mx.distributed.init(strict=True, backend=RING)
        with _file([[None, config["device"]], [config["device"], None]]) as file:  # only the own row is used
            os.environ["MLX_IBV_DEVICES"] = file.name
            os.environ["MLX_JACCL_COORDINATOR"] = "127.0.0.1:1"  # must be set, but is not used
            return mx.distributed.init(
                strict=True, backend=self._job.backend, all_gather_factory=lambda _rank, _size: self._gather
            )

    def _gather(self, mine: bytes, _num_bytes: int) -> bytes:
        """Exchanges JACCL's data with the peer through the two parents; the data of both, by rank."""
        self._channel.send(Word.GATHER, text=bytes(mine))
        return self._expect(Word.GATHERED).text

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while True:
                self._write_next()
        except ChannelClosedError:
            if self._job.leave_seconds and not self._is_within_frame and not self._is_resting:
                self._send_rest()
            raise

    def _write_next(self) -> None:
        if self._is_park_due and not self._is_within_frame:
            if not self._is_resting:
                self._send_rest()
            self._park()
        is_waiting = self._is_resting or self._is_within_frame
        record = self._channel.recv(None if is_waiting else self._job.rest_after)
        if record is None:
            self._send_rest()
        elif record.word in (Word.SEND, Word.BEGIN):
            self._send_posted(record)
        else:
            self._on_record(record)

    def _send_posted(self, record: Record) -> None:
        if self._is_resting:
            self._channel.send(Word.ROUSE)
            self._is_resting = False
        message = self._segment.view[record.offset : record.offset + record.size]
        if not self._is_within_frame:
            self._is_last = message[5] == Kind.LAST
        self._is_within_frame = record.word is Word.BEGIN
        self._send(message)
        self._is_resting = self._is_last and not self._is_within_frame  # the reader of a last frame sleeps
        self._channel.send(Word.CONSUMED)

    def _send_rest(self) -> None:
        head = pack_head(Kind.REST, nonce=self._job.nonce, seq=self._num_rests)
        self._num_rests += 1
        self._send(memoryview(head.ljust(FIRST_BYTES, b"\0")))
        self._is_resting = True

    def _send(self, message: memoryview) -> None:
        array = mx.array(message)  # type: ignore[arg-type]  # copies any buffer
        mx.eval(mx.distributed.send(array, 1, group=self._group, stream=mx.cpu))
        self._num_messages += 1

    # -- rank 1 ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self._sleep()
        while True:
            first = self._recv(FIRST_BYTES)
            if first[5] == Kind.REST:
                unpack_head(first, nonce=self._job.nonce, seq=self._num_rests)
                self._num_rests += 1
                self._sleep()
                continue
            head = unpack_head(first, nonce=self._job.nonce, seq=self._num_packets)
            self._num_packets += 1
            self._pass_on(first[: head.start + head.num_inline])
            for size in head.chunks:
                self._pass_on(self._recv(size))
            if head.kind is Kind.LAST:
                self._sleep()

    def _recv(self, size: int) -> memoryview:
        message = mx.distributed.recv((size,), mx.uint8, 0, group=self._group, stream=mx.cpu)
        mx.eval(message)
        self._num_messages += 1
        return memoryview(message)  # type: ignore[arg-type]

    def _pass_on(self, message: memoryview) -> None:
        if self._is_alone:
            return
        try:
            self._hand_over(message)
        except ChannelClosedError:
            if not self._job.leave_seconds:
                raise
            self._is_alone = True  # read on until the rest

    def _hand_over(self, message: memoryview) -> None:
        while (offset := self._ring.place(message.nbytes)) is None:
            self._on_record(self._channel.recv(None))
        self._segment.view[offset : offset + message.nbytes] = message
        self._channel.send(Word.GOT, offset, message.nbytes)
        while (record := self._channel.recv(0)) is not None:
            self._on_record(record)

    def _sleep(self) -> None:
        """Wait for the peer's WAKE: one for every rest, which may arrive before the rest is announced."""
        while self._num_wakes == 0:
            if self._is_park_due:
                self._park()
            self._on_record(self._channel.recv(None))
        self._num_wakes -= 1

    def _on_record(self, record: Record | None) -> None:
        assert record is not None
        if record.word is Word.CONSUMED:
            self._ring.consumed()
        elif record.word is Word.WAKE:
            self._num_wakes += 1
        elif record.word is Word.PARK:
            self._is_park_due = True


def _file(content: object) -> Any:
    """A temporary JSON file for MLX to read."""
    file = tempfile.NamedTemporaryFile("w", prefix="splitinfer-rdma-", suffix=".json")  # noqa: SIM115 - the caller closes it
    json.dump(content, file)
    file.flush()
    return file


def main(channel: Channel, segment: Segment) -> int:
    try:
        Child(channel, segment).run()
    except ChannelClosedError:
        return 0
    except Exception as problem:  # noqa: BLE001 - any error ends the parent's link
        text = f"{type(problem).__name__}: {problem}" if not isinstance(problem, FrameError) else str(problem)
        channel.send(Word.FAILED, text=text.encode()[:1000])
        return 1
    return 0


if __name__ == "__main__":
    import socket

    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(_CACHE_BYTES)
    if (world := World.of_this_process()) is not None:  # in tests, away from Macs
        from transports.emulated_jaccl.group import install

        install(world)
    sys.exit(main(Channel(socket.socket(fileno=int(sys.argv[1]))), Segment(int(sys.argv[2]))))
