"""Runs a command to its end, however it ends."""

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

NOT_FOUND, TIMED_OUT = 1127, 1124  # no command ends with these
_REAPING = 0.2  # seconds; a call in a driver delays even SIGKILL
_MOST_OUTPUT = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended: its exit code, its standard output and its standard error (``complaint``).
    ``silent_s``: seconds since it last wrote to standard output."""

    code: int
    output: str = ""
    complaint: str = ""
    silent_s: float = 0.0

    @property
    def why(self) -> str:
        """The command's message, in one line."""
        return " ".join((self.complaint or self.output).split())[:200] or f"exit code {self.code}"


def run(
    command: Sequence[str],
    seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    *,
    text: str = "",
    group: bool = True,
) -> Done:
    """Run a command for at most ``seconds``, then end it. The code is ``NOT_FOUND`` if the command does not exist, and
    ``TIMED_OUT`` if it hangs.

    Its output goes to files: its own children may go on and keep a pipe open, and this call would wait for them.

    Args:
        text: its standard input.
        group: give it a process group of its own, and end the whole group.
    """
    name = command[0].rpartition("/")[2]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        try:
            process = cleanup.start(
                command, env={**os.environ, **(environment or {})}, stdin=given, stdout=out, stderr=err,
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
            _kill(process, group=group)
        silent = time.time() - os.fstat(out.fileno()).st_mtime
        if code is None:
            return Done(TIMED_OUT, _text(out), f"{name} has not answered for {seconds:g} s", silent)
        return Done(code, _text(out), _text(err), silent)


def _kill(process: "subprocess.Popen[Any]", *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")
