"""Workers that the coordinator starts itself: ``address: local``. A worker starts the process of a rank, of a stage
across two machines, in the same way.

The child listens on a free port of the loopback interface and prints the address. Its standard input is a pipe without
data: when the coordinator ends, the pipe closes and the child exits, too. It has its own session, so Ctrl-C in the
terminal does not reach it first.

A child takes a second or two to start, and so does its parent. ``start_early`` lets both start at the same time.
"""

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from splitinfer import cleanup
from splitinfer.core.layout import Layout
from splitinfer.errors import WorkerUnreachable
from splitinfer.kvstore.store import Disk, seconds_to_close

START_TIMEOUT = 60.0  # seconds for the interpreter and MLX to start on a busy or cold machine
_LONGEST_LINE = 4096  # bytes; an address is a few dozen

_early: dict[str, "LocalWorker"] = {}  # started, not yet taken


def start_early(layout: Layout, disk: Disk | None) -> None:
    """Start the local workers of a layout before they are needed. ``started`` returns them later."""
    for spec in layout.workers:
        if spec.is_local and spec.name not in _early:
            _early[spec.name] = LocalWorker(spec.name, disk)
    atexit.register(end_early)


def end_early(layout: Layout | None = None) -> None:
    """End the early workers that were never taken, of one layout or all: a starting child misses its parent's end."""
    for name in list(_early) if layout is None else [spec.name for spec in layout.workers]:
        if (worker := _early.pop(name, None)) is not None:
            worker.kill()


def started(name: str, disk: Disk | None) -> "LocalWorker":
    """Take and return the worker of that name that was started early, or start a new one."""
    early = _early.pop(name, None)
    if early is not None and early.disk == disk:
        return early
    if early is not None:
        early.kill()
    return LocalWorker(name, disk)


def give_back(worker: "LocalWorker") -> None:
    """Keep a taken worker for the next ``started`` with its name."""
    _early[worker.name] = worker
    atexit.register(end_early)


class LocalWorker:
    """One child process, which the constructor starts. ``options``: further options of its command."""

    def __init__(self, name: str, disk: Disk | None = None, options: Sequence[str] = ()) -> None:
        self.name, self.disk = name, disk
        self._address: str | None = None
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-worker-")  # noqa: SIM115 - lives as long as the child
        own = ["--name", name, "--child", *_kv_options(disk), *options]
        command = [sys.executable, "-m", "splitinfer", "worker", *own]
        self._process = cleanup.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def address(self) -> str:
        """Wait until the child has printed its address, and return the address.

        Raises:
            WorkerUnreachable: the child ended (the text ends with its last line), or printed nothing in time.
        """
        if self._address is not None:
            return self._address
        line = self._first_line()
        try:
            self._address = str(json.loads(line)["address"])
            return self._address
        except (ValueError, KeyError, TypeError):
            raise WorkerUnreachable(f"the local worker {self.name} did not start: {self._last_line()}") from None

    def _first_line(self) -> bytes:
        """Return the first line that the child prints, or its whole output if that has no line end."""
        assert self._process.stdout is not None
        line, output = b"", self._process.stdout.fileno()
        give_up = time.monotonic() + START_TIMEOUT
        while b"\n" not in line and len(line) < _LONGEST_LINE:
            if not select.select([output], [], [], max(0.0, give_up - time.monotonic()))[0]:
                received = "nothing" if not line else "no whole line"
                raise WorkerUnreachable(
                    f"the local worker {self.name} did not start: {received} received for {START_TIMEOUT:g} s"
                )
            if not (more := os.read(output, _LONGEST_LINE)):
                break
            line += more
        return line.partition(b"\n")[0]

    def _last_line(self) -> str:
        if not self.ends_within(1.0):
            return "it printed no address"
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the process to end, and return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        return not self.is_alive

    def stop(self) -> None:
        """End the child, by force if it does not end by itself. Takes at most 2 seconds, plus the time to write KV to
        disk."""
        self._end(patience=1.5 + seconds_to_close(self.disk))

    def kill(self) -> None:
        """End the child at once, because it no longer responds."""
        self._end(patience=0.0)

    def _end(self, patience: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if not self.ends_within(patience):
            self._process.kill()
            self.ends_within(0.5)  # a large process may free its memory for longer, but nothing waits for that
        self._process.stdout.close()
        self._log.close()


def _kv_options(disk: Disk | None) -> list[str]:
    """Return the command line options that say where KV is stored."""
    if disk is None:
        return ["--kv-dir", "none"]
    return ["--kv-dir", str(disk.path), "--kv-disk-gb", str(disk.cap_bytes / 1e9)]
