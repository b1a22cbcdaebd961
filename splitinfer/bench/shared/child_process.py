"""A process of mlx-lm's: one JSON line in, one out; between the two it sleeps. Its end is that of its input."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from splitinfer import cleanup
from splitinfer.errors import ModelError

_GRACE = 5.0  # seconds for a child to end by itself
_LOOK = 0.2  # seconds between two looks at who still lives


class ChildProcess:
    """One Python module as a process. ``environment``: what it has beyond this one's."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+", prefix="splitinfer-bench-")  # noqa: SIM115 - lives as long as the child
        self._process = cleanup.start(
            [sys.executable, "-m", module], env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def tell(self, options: Mapping[str, Any]) -> None:
        """Send a line; whether it is read shows with the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(options) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for a line.

        Raises:
            ModelError: it ended instead; its last words.
        """
        assert self._process.stdout is not None
        try:
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer
        except (OSError, ValueError):
            raise ModelError(self.last_words()) from None

    def answers_within(self, seconds: float) -> bool:
        """Whether there is something to hear, or it has ended."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def last_words(self) -> str:
        """The last line it wrote to standard error; waits for its end."""
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End it."""
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


def hear_all(children: list[ChildProcess], patience: float) -> list[dict[str, Any]]:
    """One answer of each; who waits for another that has ended would wait for ever.

    Raises:
        ModelError: one of them ended, or they say nothing for ``patience`` seconds.
    """
    give_up = time.monotonic() + patience
    for child in children:
        while not child.answers_within(_LOOK):
            for other in children:
                if not other.is_alive:
                    raise ModelError(other.last_words())
            if time.monotonic() > give_up:
                raise ModelError(f"nothing heard for {patience:g} s")
    return [child.hear() for child in children]


# -- inside the child ----------------------------------------------------------------------------


def own_output() -> TextIO:
    """Standard output for the answers alone; what libraries print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def commands(answers: TextIO, obey: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Obey one line after the other, until the input ends."""
    for options in _lines():
        answers.write(json.dumps(obey(options)) + "\n")
        answers.flush()


def _lines() -> Iterator[dict[str, Any]]:
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)
