"""`python -m transports.rdma.child CHANNEL SEGMENT`: the process that is a member of a group.

`child_process` starts it, with two inherited descriptors. It sends UP, receives its JOB and GO with what its backend
needs, joins the group, adds one number with the peer (the first message of a new JACCL group was seen to be lost, which
a sum before it prevents) and sends READY. Then, until it ends, rank 0 sends the contents that it finds in the segment,
and rank 1 writes those that it receives to the segment. One thread does this, one operation at a time, each evaluated
before the next is made: MLX sends and receives in the order of evaluation. The heads of messages are the children's own
affair, so checksums take none of the engine's time.

**The end.** When its parent disconnects, rank 0 sends one more message, LAST, so that rank 1 need not be killed within
a receive: on JACCL that leaves memory registered until a restart (mlx#3910). For the same reason a rank 1 on a device
whose parent is gone reads on, for nobody, until that comes. PARK does the same at the end of a link alone: both ends
rest, and wait for another link on the group (`groups`).

It never outlives its parent by more than that takes. Standard input is a pipe that no process writes to; when it
closes, a second thread ends the process, even while the first one waits. That thread also sends ALIVE. It cannot run
while a group is being joined, as MLX then holds the GIL and waits without limit: so an alarm is set, whose default
action needs no Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx

from transports.base import FrameError
from transports.emulation import emulator
from transports.rdma import leftovers
from transports.rdma.address import RING
from transports.rdma.channel import Channel, ChannelClosedError, Job, Record, Word
from transports.rdma.messages import HEAD_BYTES, MESSAGE_BYTES, ROOM_BYTES, Head, Kind, num_messages, seal, unseal
from transports.rdma.probe import emulated
from transports.rdma.segment import SEGMENT_BYTES, Ring, Segment

_CACHE_BYTES = 16 << 20
_RELEASE_SECONDS = 0.5  # for rank 0 to learn of the end, if need be over the control link, and for its LAST to arrive


class Child:
    def __init__(self, channel: Channel, segment: Segment) -> None:
        self._channel = channel
        self._segment = segment
        self._job: Job
        self._group: mx.distributed.Group
        self._is_resting = True  # both ends begin at rest
        self._num_messages = 0  # in the group, of all links on it
        self._num_wakes = 0
        self._ring = Ring(SEGMENT_BYTES)
        self._run_at = 0  # where the run that is being received lies, and how much of it has come
        self._run_bytes = 0
        self._empty = memoryview(bytearray(MESSAGE_BYTES))
        self._is_park_due = False
        self._is_parked = False
        self._is_alone = False  # the parent is gone

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
        if self._job.rank != 0:
            self._read()
        try:
            self._write()
        except ChannelClosedError:
            self._release()
            raise

    def _add_up(self) -> None:
        """Add one number with the peer. Raises FrameError if the sum is not that of two."""
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
        if self._job.device:
            time.sleep(self._job.leave_seconds)  # usually the first thread notices, too, and ends the process before
            leftovers.record(self._job.device, os.getpid())
        else:
            time.sleep(_RELEASE_SECONDS)
        os._exit(0)

    # -- between two links -------------------------------------------------------------------------------------------

    def _park(self) -> None:
        """Rest until there is another link on this group."""
        self._is_parked, self._is_park_due = True, False
        self._channel.send(Word.PARKED, size=self._num_messages)
        while (record := self._channel.recv(None)) is not None and record.word is not Word.RENEW:
            pass  # of the last link
        assert record is not None
        for _ in range(record.size):  # sent at the end of the last link, when nobody could wake this end any more
            unseal(self._recv(), nonce=self._job.nonce, seq=self._num_messages)
            self._num_messages += 1
        self._job = replace(self._job, **json.loads(record.text))
        self._ring, self._run_bytes, self._num_wakes = Ring(SEGMENT_BYTES), 0, 0
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
        is_within_frame = False
        while True:
            record = self._channel.recv(None if self._is_resting or is_within_frame else self._job.rest_after)
            if record is None:
                self._send_empty(Kind.REST)
                continue
            if record.word is Word.PARK:
                self._release()
                self._park()
                is_within_frame = False
                continue
            if self._is_resting:
                self._channel.send(Word.ROUSE)
                self._is_resting = False
            self._send_run(record)
            self._channel.send(Word.CONSUMED)
            is_within_frame = record.word is Word.BEGIN
            self._is_resting = record.word is Word.LAST

    def _send_run(self, record: Record) -> None:
        """Send the contents of a record, each with its head."""
        offset, left = record.offset, record.size
        for num_next in reversed(range(num_messages(record.size))):
            kind = Kind.LAST if record.word is Word.LAST and num_next == 0 else Kind.DATA
            head = Head(kind, min(left, ROOM_BYTES), num_next)
            self._send(self._segment.view[offset : offset + MESSAGE_BYTES], head)
            offset += MESSAGE_BYTES
            left -= ROOM_BYTES

    def _send_empty(self, kind: Kind) -> None:
        """Send a message after which the peer does not receive until it is woken."""
        self._send(self._empty, Head(kind, 0))
        self._is_resting = True

    def _release(self) -> None:
        """Let the peer leave its receive. Its next message is always a whole one, wherever a frame was broken off."""
        if not self._is_resting:
            with contextlib.suppress(RuntimeError):  # on ring, where a peer that is gone is noticed
                self._send_empty(Kind.LAST)

    def _send(self, message: memoryview, head: Head) -> None:
        seq, self._num_messages = self._num_messages, self._num_messages + 1
        seal(message, head, nonce=self._job.nonce, seq=seq, checked=self._job.checked)
        array = mx.array(message)  # type: ignore[arg-type]  # copies any buffer
        mx.eval(mx.distributed.send(array, 1, group=self._group, stream=mx.cpu))

    # -- rank 1 ------------------------------------------------------------------------------------------------------

    def _read(self) -> NoReturn:
        self._sleep()
        while True:
            message = self._recv()
            head = unseal(message, nonce=self._job.nonce, seq=self._num_messages)
            self._num_messages += 1
            if head.num_used > 0 and not self._is_alone:
                self._hand_over(message[HEAD_BYTES : HEAD_BYTES + head.num_used], head.num_next)
            if head.kind is not Kind.DATA:
                self._sleep()

    def _recv(self) -> memoryview:
        message = mx.distributed.recv((MESSAGE_BYTES,), mx.uint8, 0, group=self._group, stream=mx.cpu)
        mx.eval(message)
        return memoryview(message)  # type: ignore[arg-type]

    def _hand_over(self, content: memoryview, num_next: int) -> None:
        try:
            self._keep(content, num_next)
        except ChannelClosedError:
            if not self._job.device:
                raise
            self._is_alone = True  # read on until the peer rests

    def _keep(self, content: memoryview, num_next: int) -> None:
        """Write to the segment; tell the parent when the run is complete."""
        if self._run_bytes == 0:
            self._run_at = self._place(content.nbytes + num_next * ROOM_BYTES)
        end = self._run_at + self._run_bytes
        self._segment.view[end : end + content.nbytes] = content
        self._run_bytes += content.nbytes
        if num_next > 0:
            return
        self._channel.send(Word.GOT, self._run_at, self._run_bytes)
        self._run_bytes = 0
        while (record := self._channel.recv(0)) is not None:
            self._on_record(record)

    def _place(self, num_bytes: int) -> int:
        while (offset := self._ring.place(num_bytes)) is None:
            self._on_record(self._channel.recv(None))
        return offset

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
        with contextlib.suppress(ChannelClosedError):
            channel.send(Word.FAILED, text=text.encode()[:1000])
        return 1
    return 0


if __name__ == "__main__":
    import socket

    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(_CACHE_BYTES)
    if (world := emulated()) is not None:  # in tests, away from Macs
        emulator("jaccl.group").install(world)
    code = main(Channel(socket.socket(fileno=int(sys.argv[1]))), Segment(int(sys.argv[2])))
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end waits for MLX's threads, and stops the one that would end this process
