"""Runs one of the system's commands to its end, whatever becomes of it."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

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
        return " ".join((self.complaint or self.output).split())[:200] or f"exit code {self.code}"


def run(command: Sequence[str], seconds: float = 60.0) -> Done:
    """Run a command to its end. One that does not exist ends with 127, one that hangs with 124."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=seconds, text=True,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Done(_TIMED_OUT, complaint=f"{command[0]} has not answered for {seconds:g} s")
    except FileNotFoundError:
        return Done(_NOT_FOUND, complaint=f"there is no {command[0]} here")
    except OSError as error:
        return Done(_NOT_FOUND, complaint=str(error))
    return Done(ended.returncode, ended.stdout, ended.stderr)
