"""The engine's handle on its child: starts it, exchanges messages with it, and ends it in any case."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket as sockets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transports.base import LinkClosed
from transports.rdma import leftovers
from transports.rdma.channel import Channel, ChannelClosedError, Job, Record, Word
from transports.rdma.devices import Claim
from transports.rdma.messages import HEAD_BYTES, MAX_RUN, MESSAGE_BYTES, ROOM_BYTES, Stream, num_messages
from transports.rdma.segment import SEGMENT_BYTES, Ring, Segment

log = logging.getLogger("transports")

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 0.5  # for a child to end by itself; one that waits in the group cannot before it is released
LEAVE_SECONDS = 3.0  # for one on a device to come out of the group, which takes its peer's last message
_KILLED_SECONDS = 5.0  # for the system to end one
# JACCL reads its own names before MLX's, and MLX_METAL_FAST_SYNCH was seen to hang GPUs together with RDMA.
_REMOVED_VARIABLES = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_", "MLX_METAL_FAST_SYNCH")


class ChildProcess:
    """One child and the segment shared with it. `claim`: on the device of its group; None for ring."""

    def __init__(self, claim: Claim | None = None) -> None:
        self._claim = claim
        self._ring = Ring(SEGMENT_BYTES)
        self._room = threading.Condition()
        self._posting = threading.Lock()
        self._is_disconnected = False
        self.life = 0  # the number of the link that it serves: what a late thread of an earlier one does has no effect
        self._is_reader = False
        self._is_joined = False  # or joining
        self._is_exiting = False  # by itself
        self._num_at_rest: int | None = None  # messages in the group, once the child is parked
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-rdma-")  # noqa: SIM115 - lives as long as the child
        self.segment = Segment.make()
        ours, theirs = sockets.socketpair()
        self.channel = Channel(ours)
        with theirs:
            try:
                self._process = self._start(theirs.fileno(), self.segment.descriptor, also=claim)
            except OSError:
                ours.close()
                if claim is not None:
                    claim.release()
                self.segment.close()
                self._log.close()
                raise

    def _start(self, *descriptors: int, also: Claim | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "transports.rdma.child", *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=descriptors if also is None else (*descriptors, also.descriptor),
            env=_environment(),
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the parent
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, job: Job) -> None:
        """Send the child its job. Raises ChannelClosedError."""
        self._is_reader = job.rank == 1
        self.channel.send(Word.JOB, text=json.dumps(asdict(job)).encode())

    def go(self, **config: object) -> None:
        """Have the child join its group; from now on it may wait in an operation. Raises ChannelClosedError."""
        self._is_joined = True
        self.channel.send(Word.GO, text=json.dumps(config).encode())

    @property
    def device(self) -> str:
        """The device of its group; "" for ring."""
        return "" if self._claim is None else self._claim.device

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    # -- writing -----------------------------------------------------------------------------------------------------

    def post(self, pieces: Sequence[memoryview | bytes], patience: float, life: int, *, is_last: bool = False) -> int:
        """Pass a frame to the child, in runs of messages without their heads; the bytes of content.

        Waits at most `patience` seconds for room for each run. `life`: the link's (`life`). `is_last`: nothing will
        follow.

        Raises:
            TimeoutError: there was no room.
            LinkClosed: `stop` or `disconnect` was called.
            ChannelClosedError: the child is gone.
        """
        stream = Stream(pieces)
        num_bytes = left = sum(memoryview(piece).nbytes for piece in pieces)
        longest = 1
        with self._posting:
            if life != self.life:
                raise LinkClosed("")
            while left > 0:
                num = min(longest, num_messages(left))
                longest = min(2 * longest, MAX_RUN)
                offset = self._wait_for_room(num * MESSAGE_BYTES, patience)
                size = sum(stream.fill(self._room_of(offset + index * MESSAGE_BYTES)) for index in range(num))
                left -= size
                word = Word.BEGIN if left > 0 else Word.LAST if is_last else Word.SEND
                self.channel.send(word, offset, size)
        return num_bytes

    def _room_of(self, message: int) -> memoryview:
        """Where the content of the message at this offset goes."""
        return self.segment.view[message + HEAD_BYTES : message + HEAD_BYTES + ROOM_BYTES]

    def _wait_for_room(self, size: int, patience: float) -> int:
        give_up_at = time.monotonic() + patience
        with self._room:
            while not self._is_disconnected:
                if (offset := self._ring.place(size)) is not None:
                    return offset
                if not self._room.wait(give_up_at - time.monotonic()) and time.monotonic() >= give_up_at:
                    raise TimeoutError
        raise LinkClosed("")

    def consumed(self) -> None:
        """The child has sent the oldest run."""
        with self._room:
            self._ring.consumed()
            self._room.notify_all()

    def wake(self, life: int) -> None:
        """The peer's child has something to send."""
        with self._room:
            if life == self.life:
                with contextlib.suppress(ChannelClosedError):  # who receives will notice
                    self.channel.send(Word.WAKE)

    # -- between two links -------------------------------------------------------------------------------------------

    def stop(self, life: int) -> None:
        """The link is over: end all waits for room, and ask the child to rest. From any thread, without waiting."""
        if self._claim is None:
            self.disconnect()
            return
        with self._room:
            if life == self.life and not self._is_disconnected:
                self._end_waits()
                with contextlib.suppress(ChannelClosedError):  # who receives will notice
                    self.channel.send(Word.PARK)

    def park(self) -> int | None:
        """Wait, after `stop`, until the child rests, up to LEAVE_SECONDS. By the thread that receives from it.

        Returns:
            How many messages were sent or received in the group since it was joined; None if the child does not rest.
        """
        if self._claim is None:
            return None
        give_up_at = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(ChannelClosedError):
            while self._num_at_rest is None and (left := give_up_at - time.monotonic()) > 0:
                record = self.channel.recv(left)
                if record is not None and not self._drain(record):
                    break
            else:
                return self._num_at_rest
        self._is_exiting = True
        return None

    def _drain(self, record: Record) -> bool:
        """Drop what the child hands over; whether it goes on."""
        if record.word is Word.PARKED:
            self.parked(record)
        elif record.word is Word.GOT:
            self.channel.send(Word.CONSUMED)
        return record.word is not Word.FAILED

    def parked(self, record: Record) -> None:
        """The child has come to rest."""
        self._num_at_rest = record.size

    def renew(self, num_missed: int, *, nonce: int, alive_every: float, checked: bool) -> None:
        """Begin the next link on the group of a parked child (`Job`), which first receives and drops `num_missed`
        messages. Raises ChannelClosedError."""
        with self._posting, self._room:  # the last link's senders have noticed its end
            self.life += 1
            self._ring = Ring(SEGMENT_BYTES)  # what they had written was not sent, or was
            self._is_disconnected = False
        self._num_at_rest = None
        text = json.dumps({"nonce": nonce, "alive_every": alive_every, "checked": checked})
        self.channel.send(Word.RENEW, size=num_missed, text=text.encode())

    # -- the end -----------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """End all waits for room and shut the channel at both ends. From any thread, without waiting."""
        with self._room:
            self._end_waits()
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(sockets.SHUT_RDWR)

    def _end_waits(self) -> None:
        self._is_disconnected = True
        self._room.notify_all()

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """End the process and free its resources. To be called once, by the thread that receives from the channel."""
        self.disconnect()
        is_at_rest = self._num_at_rest is not None
        hangs = not self._ends_within(LEAVE_SECONDS if is_at_rest or self._is_exiting else grace)
        if hangs:
            self._process.kill()
        if not self._ends_within(_KILLED_SECONDS):
            log.warning("process %d of %s cannot be ended", self.pid, self.device or "a ring")
        was_crashed = self._is_reader and (self._process.returncode or 0) < 0
        if self.device and self._is_joined and not is_at_rest and (hangs or was_crashed):
            leftovers.record(self.device, self.pid)
        if self._claim is not None:
            self._claim.release()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.channel.socket.close()
        self._log.close()
        with self._posting:  # a sender in `post` is about to raise
            self.segment.close()

    def exit_summary(self) -> str:
        """How a child ended by itself: its exit code or signal, and the last line that it printed."""
        self._ends_within(_GRACE_SECONDS)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        code = self._process.returncode
        how = "still runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {lines[-1][:200]}" if lines else how

    def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED_VARIABLES)}
    folders = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(folders)}
