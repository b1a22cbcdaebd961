"""The processes of this machine, and which of them are splitinfer's.

One is known by its command line: ``.../splitinfer COMMAND ...`` or ``python -m splitinfer COMMAND ...``. That of
another user's process is anybody's to read on Linux. macOS gives it to its owner and to root alone (psutil's
documentation, ``Process.cmdline``), and to ``ps``, which runs as root there.
"""

import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from splitinfer.system.command import run

_PS = ("ps", "-axww", "-o", "pid=", "-o", "command=")
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process. user: its owner's name. words: its command line. started: seconds since 1970."""

    pid: int
    user: str
    is_own: bool
    words: tuple[str, ...]
    started: float = 0.0
    parent: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """The command of splitinfer that it runs, with its options; empty if it is another program."""
        return command_in(self.words)


def command_in(words: Sequence[str]) -> tuple[str, ...]:
    """The command of splitinfer in a command line, with its options; empty if it is another program's.

    >>> command_in(["/x/python", "/x/bin/splitinfer", "worker", "--port", "7"]), command_in(["vim", "splitinfer", "x"])
    (('worker', '--port', '7'), ())
    """
    at = next((at for at in range(len(words)) if _is_program(words, at)), len(words))
    return tuple(words[at + 1 :])


def _is_program(words: Sequence[str], at: int) -> bool:
    """Whether a word is what is run, and not an argument of another program, such as an editor."""
    if at > 0 and words[at - 1] == "-m":
        return words[at] == "splitinfer"
    if PurePath(words[at]).name != "splitinfer" or at > 1:
        return False
    return at == 0 or PurePath(words[0]).name.lower().startswith("python")  # a script: by itself, or by its interpreter


def processes() -> list[Process]:
    """All processes that can be seen and have a command line."""
    own = getpass.getuser()
    read = [each.info for each in psutil.process_iter(["pid", "username", "cmdline", "create_time", "ppid"])]
    hidden = any(info["cmdline"] is None for info in read)
    shown = from_ps(run(_PS, _SECONDS).output) if hidden else {}
    return [
        Process(
            info["pid"],
            info["username"] or "",
            info["username"] == own,
            tuple(info["cmdline"] or shown.get(info["pid"], ())),
            info["create_time"] or 0.0,
            info["ppid"] or 0,
        )
        for info in read
        if info["cmdline"] or info["pid"] in shown
    ]


def from_ps(text: str) -> dict[int, tuple[str, ...]]:
    """Command lines by process id, as ``ps -axww -o pid= -o command=`` prints them (ps(1), macOS and Linux); words with
    spaces in them fall apart, which options of a worker survive.

    >>> from_ps("  12 /x/python -m splitinfer worker\\n")
    {12: ('/x/python', '-m', 'splitinfer', 'worker')}
    """
    rows = (line.split() for line in text.splitlines())
    return {int(row[0]): tuple(row[1:]) for row in rows if len(row) > 1 and row[0].isdigit()}
