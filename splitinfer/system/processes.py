"""Lists this user's processes on this machine, and tells which of them are splitinfer's.

Their command line shows it: ``.../splitinfer COMMAND ...`` or ``python -m splitinfer COMMAND ...``.
"""

import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil


@dataclass(frozen=True, slots=True)
class Process:
    """A process. words: its command line. started: seconds since 1970."""

    pid: int
    words: tuple[str, ...]
    started: float = 0.0
    parent: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """The splitinfer command that it runs, with its options; empty if it is another program."""
        return command_in(self.words)


def command_in(words: Sequence[str]) -> tuple[str, ...]:
    """Return the splitinfer command in a command line, with its options; empty if it is another program's.

    >>> command_in(["/x/python", "/x/bin/splitinfer", "worker", "--port", "7"]), command_in(["vim", "splitinfer", "x"])
    (('worker', '--port', '7'), ())
    """
    at = next((at for at in range(len(words)) if _is_program(words, at)), len(words))
    return tuple(words[at + 1 :])


def _is_program(words: Sequence[str], at: int) -> bool:
    """Return whether a word is the program itself, not an argument of another program, such as an editor."""
    if at > 0 and words[at - 1] == "-m":
        return words[at] == "splitinfer"
    if PurePath(words[at]).name != "splitinfer" or at > 1:
        return False
    return at == 0 or PurePath(words[0]).name.lower().startswith("python")  # a script: by itself, or by its interpreter


def processes() -> list[Process]:
    """Return this user's processes that have a command line."""
    own = getpass.getuser()
    read = (each.info for each in psutil.process_iter(["pid", "username", "cmdline", "create_time", "ppid"]))
    return [
        Process(info["pid"], tuple(info["cmdline"]), info["create_time"] or 0.0, info["ppid"] or 0)
        for info in read
        if info["username"] == own and info["cmdline"]
    ]
