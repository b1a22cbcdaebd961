"""Runs a command to its end, whatever becomes of it."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from splitinfer import cleanup

NOT_FOUND, TIMED_OUT = 127, 124  # what a shell and timeout(1) say
_REAPING = 0.2  # seconds; a call in a driver delays even SIGKILL
_MOST_OUTPUT = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended: its exit code, and what it wrote to standard output and standard error. ``silent_s``:
    seconds since it last wrote to the former."""

    code: int
    output: str = ""
    complaint: str = ""
    silent_s: float = 0.0

    @property
    def why(self) -> str:
        """What it said, in one line."""
        return " ".join((self.complaint or self.output).split())[:200] or f"exit code {self.code}"


def run(command: Sequence[str], seconds: float = 60.0, environment: Mapping[str, str] | None = None) -> Done:
    """Run a command for at most ``seconds``; then end it with all that it has started in its group. One that does not
    exist ends with ``NOT_FOUND``, one that hangs with ``TIMED_OUT``.

    Its output goes to files: what it has started may go on and keep them open, and a pipe would be waited for.
    """
    name = command[0].rpartition("/")[2]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = cleanup.start(
                command, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return Done(NOT_FOUND, complaint=f"there is no {name} here")
        except OSError as error:
            return Done(NOT_FOUND, complaint=str(error))
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            _kill_group(process)
        silent = time.time() - os.fstat(out.fileno()).st_mtime
        if code is None:
            return Done(TIMED_OUT, _text(out), f"{name} has not answered for {seconds:g} s", silent)
        return Done(code, _text(out), _text(err), silent)


def _kill_group(process: "subprocess.Popen[Any]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")
