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
from transports.rdma.messages import CHUNK_BYTES, FIRST_BYTES, Stream
from transports.rdma.segment import SEGMENT_BYTES, Ring, Segment

log = logging.getLogger("transports")

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 0.3  # for a child to end by itself; one that waits in the group cannot
LEAVE_SECONDS = 2.0  # for one on a device to come out of the group: to complete a frame, to hear of its peer's rest
_KILLED_SECONDS = 5.0  # for the system to end one
_TRY_SECONDS = 0.02
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
        self._is_stopped = False  # no frame is begun any more
        self._is_park_sent = False
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

    def post(self, head: bytes, pieces: Sequence[memoryview | bytes], patience: float) -> None:
        """Pass a frame to the child. Waits at most `patience` seconds for room for each of its messages.

        Raises:
            TimeoutError: there was no room.
            LinkClosed: `disconnect` was called.
            ChannelClosedError: the child is gone.
        """
        stream = Stream((head, *pieces))
        left = len(head) + sum(memoryview(piece).nbytes for piece in pieces)
        size = FIRST_BYTES
        with self._posting:
            if self._is_stopped:
                raise LinkClosed("")
            while left > 0:
                offset = self._wait_for_room(size, patience)
                left -= stream.fill(self.segment.view[offset : offset + size])
                self.channel.send(Word.BEGIN if left > 0 else Word.SEND, offset, size)
                size = min(left, CHUNK_BYTES)

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
        """The child has sent the oldest message."""
        with self._room:
            self._ring.consumed()
            self._room.notify_all()

    # -- between two links -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The link is over: no frame is begun any more. From any thread, without waiting.

        A frame that is being written is completed, as a group within a frame can neither be kept nor left.
        """
        if self._claim is None or not self._is_joined:
            self.disconnect()
            return
        self._is_stopped = True
        self._ask_to_park(0.0)

    def _ask_to_park(self, seconds: float) -> None:
        """Ask the child to park, unless a frame is still being written after `seconds`."""
        if not self._is_park_sent and self._posting.acquire(timeout=seconds):
            try:
                self._is_park_sent = True
                self.channel.send(Word.PARK)
            except ChannelClosedError:
                pass  # who receives will notice
            finally:
                self._posting.release()

    def park(self) -> int | None:
        """Have the child come to rest, within LEAVE_SECONDS, after `stop`. By the thread that receives from it.

        Returns:
            How many messages were sent or received in the group since it was joined; None if the child does not rest.
        """
        give_up_at = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(ChannelClosedError):
            while self._num_at_rest is None and self._is_stopped and time.monotonic() < give_up_at:
                self._ask_to_park(_TRY_SECONDS)
                record = self.channel.recv(0.0 if not self._is_park_sent else give_up_at - time.monotonic())
                if record is None:
                    continue
                if record.word is Word.PARKED:
                    self.parked(record)
                elif record.word is Word.CONSUMED:
                    self.consumed()
                elif record.word is Word.GOT:
                    self.channel.send(Word.CONSUMED)
                elif record.word is Word.FAILED:
                    break
            else:
                return self._num_at_rest
        self._is_exiting = True
        return None

    def parked(self, record: Record) -> None:
        """The child has come to rest."""
        self._num_at_rest = record.size

    def renew(self, nonce: int) -> None:
        """Begin the next link on the group of a parked child. Raises ChannelClosedError."""
        self._num_at_rest = None
        self._is_stopped = self._is_park_sent = False
        self.channel.send(Word.RENEW, text=json.dumps({"nonce": nonce}).encode())

    # -- the end -----------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """End all waits for room and shut the channel at both ends. From any thread, without waiting."""
        with self._room:
            self._is_disconnected = True
            self._room.notify_all()
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(sockets.SHUT_RDWR)

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
