"""Where a service is installed, a user's home on a kind of system, and how commands are run there."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
        return " ".join((self.complaint or self.output).split())[:200] or f"exit code {self.code}"


def run(command: Sequence[str]) -> Done:
    """Run a command to its end. One that does not exist ends with 127, one that hangs with 124."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS, text=True,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Done(_TIMED_OUT, complaint=f"{command[0]} has not answered for {SECONDS:g} s")
    except FileNotFoundError:
        return Done(_NOT_FOUND, complaint=f"there is no {command[0]} here")
    except OSError as error:
        return Done(_NOT_FOUND, complaint=str(error))
    return Done(ended.returncode, ended.stdout, ended.stderr)


@dataclass(frozen=True, slots=True)
class Place:
    """platform: as ``sys.platform`` has it. user: the user's id. sleep: waits for that many seconds."""

    platform: str
    home: Path
    user: int
    environment: Mapping[str, str] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep


def here() -> Place:
    """This process's user, on this machine."""
    return Place(sys.platform, Path.home(), os.geteuid(), dict(os.environ))
