"""The engine's handle on its child: starts it, exchanges messages with it, and ends it in any case."""

from __future__ import annotations

import contextlib
import json
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
from transports.rdma.channel import Channel, Job, Word
from transports.rdma.messages import HEAD_BYTES, MAX_RUN, MESSAGE_BYTES, ROOM_BYTES, Stream, num_messages
from transports.rdma.segment import SEGMENT_BYTES, Ring, Segment

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 0.5  # for a child to end by itself; one that waits in the group cannot before it is released
_KILLED_SECONDS = 5.0  # for the system to end one
# JACCL reads its own names before MLX's, and MLX_METAL_FAST_SYNCH was seen to hang GPUs together with RDMA.
_REMOVED_VARIABLES = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_", "MLX_METAL_FAST_SYNCH")


class ChildProcess:
    """One child and the segment shared with it."""

    def __init__(self) -> None:
        self._ring = Ring(SEGMENT_BYTES)
        self._room = threading.Condition()
        self._posting = threading.Lock()
        self._is_disconnected = False
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-rdma-")  # noqa: SIM115 - lives as long as the child
        self.segment = Segment.make()
        ours, theirs = sockets.socketpair()
        self.channel = Channel(ours)
        with theirs:
            try:
                self._process = self._start(theirs.fileno(), self.segment.descriptor)
            except OSError:
                ours.close()
                self.segment.close()
                self._log.close()
                raise

    def _start(self, *descriptors: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "transports.rdma.child", *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=descriptors,
            env=_environment(),
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the parent
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, job: Job) -> None:
        """Send the child its job. Raises ChannelClosedError."""
        self.channel.send(Word.JOB, text=json.dumps(asdict(job)).encode())

    # -- writing -----------------------------------------------------------------------------------------------------

    def post(self, pieces: Sequence[memoryview | bytes], patience: float, *, is_last: bool = False) -> int:
        """Pass a frame to the child, in runs of messages without their heads; the bytes of content.

        Waits at most `patience` seconds for room for each run. `is_last`: nothing will follow.

        Raises:
            TimeoutError: there was no room.
            LinkClosed: `disconnect` was called.
            ChannelClosedError: the child is gone.
        """
        stream = Stream(pieces)
        num_bytes = left = sum(memoryview(piece).nbytes for piece in pieces)
        longest = 1
        with self._posting:
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
        if not self._ends_within(grace):
            self._process.kill()
            self._ends_within(_KILLED_SECONDS)
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
