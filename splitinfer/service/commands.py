"""Runs the commands of launchd and systemd, each with a time limit."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SECONDS = 60.0  # a stop waits for what it stops
_NOT_FOUND, _TIMED_OUT = 127, 124  # what a shell and timeout(1) say


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended: its exit code, and what it wrote to standard output and standard error."""

    code: int
    output: str = ""
    complaint: str = ""

    @property
    def why(self) -> str:
        """What it said, in one line."""
        return " ".join((self.complaint or self.output).split()) or f"exit code {self.code}"


Run = Callable[[Sequence[str]], Done]


def run(command: Sequence[str]) -> Done:
    """Run a command to its end. One that is not there ends with 127, one that hangs with 124."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS, text=True,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Done(_TIMED_OUT, complaint=f"{command[0]} has not answered for {SECONDS:g} s")
    except OSError as error:
        there_is_none = isinstance(error, FileNotFoundError)
        return Done(_NOT_FOUND, complaint=f"there is no {command[0]} here" if there_is_none else str(error))
    return Done(ended.returncode, ended.stdout, ended.stderr)
