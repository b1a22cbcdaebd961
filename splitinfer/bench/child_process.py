"""Child processes that answer one JSON line with another, sleep in between, and end with their input."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

from splitinfer import cleanup
from splitinfer.errors import ModelError
from splitinfer.probes.child import own_output

_GRACE = 5.0  # seconds for a child to end by itself


class AskedProcess:
    """A Python module as a child process. ``environment``: variables in addition to this process's. ``command``: words
    that run it instead, for example elsewhere."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, command: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-bench-")  # noqa: SIM115 - lives as long as the child
        self._process = cleanup.start(
            command or [sys.executable, "-m", module], env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    def send(self, options: Mapping[str, Any]) -> None:
        """Send a line. If the child has ended, ``receive`` will notice."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(options) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a line.

        Raises:
            ModelError: the child has ended; the text is the last line of its log.
        """
        assert self._process.stdout is not None
        try:
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer
        except (OSError, ValueError):
            raise ModelError(self.last_line()) from None

    def has_answer(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for an answer. Return whether one came or the child has ended."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def last_line(self) -> str:
        """Wait for the child's end. Return the last line of its standard error, or its exit code."""
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the child, if necessary with SIGKILL."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=_GRACE)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


# -- inside the child ----------------------------------------------------------------------------

Handle = Callable[[dict[str, Any]], dict[str, Any]]  # returns the answer to one line


def serve(opened: Callable[[dict[str, Any]], AbstractContextManager[tuple[dict[str, Any], Handle]]]) -> None:
    """Open something by the first line, and answer further lines until the input ends. ``opened`` yields the answer to
    the first line, and a function for the others. Output of libraries goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    threading.Thread(target=_end_with_input, daemon=True).start()
    answers = own_output()
    with opened(json.loads(sys.stdin.readline())) as (answer, handle):
        _write(answers, answer)
        for line in iter(sys.stdin.readline, ""):
            _write(answers, handle(json.loads(line)))


def _end_with_input() -> None:
    """End the process a while after its input has ended: a task that waits for another machine would never end."""
    hung_up = select.poll()
    hung_up.register(0, 0)  # POLLHUP is always reported
    hung_up.poll()
    time.sleep(_GRACE)
    os._exit(1)


def _write(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
