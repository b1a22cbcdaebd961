"""The engine's handle on its child: starts it, exchanges messages with it, and ends it in any case.

An RDMA device has about 100 memory regions, and a group takes 64 of them (mlx#3162). So a process has one child per
device, and the next child waits until the last one has ended.
"""

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transports.base import Buffer, LinkClosed, TransportUnavailable
from transports.rdma.channel import LEAVE_SECONDS, Channel, ChannelClosedError, ChannelWord, Job, Segment, Slots
from transports.rdma.messages import CHUNK_MESSAGES, HEAD_BYTES, MESSAGE_BYTES, ROOM_BYTES, Stream

log = logging.getLogger("transports")

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 0.5  # to collect a child that has ended by itself
_KILLED_SECONDS = 5.0  # for the system to end a killed child
_DEVICE_SECONDS = LEAVE_SECONDS + 2.0
# JACCL reads its own names before MLX's, and MLX_METAL_FAST_SYNCH was seen to hang GPUs together with RDMA.
_REMOVED_VARIABLES = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_", "MLX_METAL_FAST_SYNCH")

_devices: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # held while a child uses the device


class ChildProcess:
    """One child and the segment shared with it. Raises TransportUnavailable if another link has its device."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._slots = Slots()
        self._room = threading.Condition()
        self._posting = threading.Lock()
        self._is_disconnected = False
        with contextlib.ExitStack() as undo:
            if job.device:
                if not _devices[job.device].acquire(timeout=_DEVICE_SECONDS):
                    raise TransportUnavailable(f"{job.device} carries a link already, and has room for one")
                undo.callback(_devices[job.device].release)
            self._log = undo.enter_context(tempfile.TemporaryFile("w+", prefix="splitinfer-rdma-"))
            self.segment = Segment.make()
            undo.callback(self.segment.close)
            ours, theirs = sockets.socketpair()
            undo.callback(ours.close)
            self.channel = Channel(ours)
            with theirs:
                self._process = self._start(theirs.fileno(), self.segment.descriptor)
            self._free = undo.pop_all()
        with contextlib.suppress(ChannelClosedError):  # the receiving thread will notice
            self.channel.send(ChannelWord.JOB, text=json.dumps(asdict(job)).encode())

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

    # -- writing -----------------------------------------------------------------------------------------------------

    def post(self, pieces: Sequence[Buffer], patience: float) -> int:
        """Pass a frame to the child in chunks of messages without their heads. Return the bytes of content.

        Waits at most `patience` seconds for room for each chunk.

        Raises:
            TimeoutError: there was no room.
            LinkClosed: `disconnect` was called.
            ChannelClosedError: the child is gone.
        """
        stream = Stream(pieces)
        num_bytes = left = sum(memoryview(piece).nbytes for piece in pieces)
        with self._posting:
            while left > 0:
                offset = self._wait_for_room(patience)
                starts = range(offset + HEAD_BYTES, offset + CHUNK_MESSAGES * MESSAGE_BYTES, MESSAGE_BYTES)
                size = sum(stream.fill(self.segment.view[start : start + ROOM_BYTES]) for start in starts)
                left -= size
                self.channel.send(ChannelWord.SEND, offset, size)
        return num_bytes

    def _wait_for_room(self, patience: float) -> int:
        give_up_at = time.monotonic() + patience
        with self._room:
            while not self._is_disconnected:
                if (offset := self._slots.take()) is not None:
                    return offset
                if not self._room.wait(give_up_at - time.monotonic()) and time.monotonic() >= give_up_at:
                    raise TimeoutError
        raise LinkClosed("")

    def consumed(self) -> None:
        """Free the slot of the oldest chunk, which the child has sent."""
        with self._room:
            self._slots.consumed()
            self._room.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """End all waits for room and shut the channel at both ends. From any thread, without waiting."""
        with self._room:
            self._is_disconnected = True
            self._room.notify_all()
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(sockets.SHUT_RDWR)

    def end(self, seconds: float = LEAVE_SECONDS) -> None:
        """End the process, which may take `seconds` to leave its group, and free its resources. The thread that
        receives from the channel must call it, once."""
        self.disconnect()
        if not self._ends_within(seconds):
            self._process.kill()
            if self.job.device:
                text = "process %d was killed inside an RDMA operation on %s: memory may stay wired until a restart"
                log.warning(f"{text} of this Mac (mlx#3910)", self.pid, self.job.device)
        if not self._ends_within(_KILLED_SECONDS):
            log.warning("process %d of %s cannot be ended", self.pid, self.job.device or "a ring")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with self._posting:  # a sender in `post` is about to raise
            self._free.close()

    def exit_summary(self) -> str:
        """Return how a child ended by itself: its exit code or signal, and the last line that it printed."""
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
