"""Which workers run on this machine, from its list of processes and the records of `up`. Pure.

A worker is known by its command line: ``.../splitinfer worker ...`` or ``python -m splitinfer worker ...``. Workers
that a coordinator started for itself (``--child``) are its own business. A record is believed only while a process with
its number runs that is a worker and began when the record says: numbers are used again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import pydantic

from splitinfer.launch.hosts import DEFAULT_PORT
from splitinfer.wire.messages import Versions

_SAME_START = 2.0  # seconds by which two readings of one process's start may differ, when clocks are set
_LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class Process:
    """A process. user: its owner's name. words: its command line. started: seconds since 1970."""

    pid: int
    user: str
    is_own: bool
    words: tuple[str, ...]
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """What a worker's command line says."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    is_insecure: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine reaches it."""
        return self.host in _LOOPBACK or self.host.startswith("127.")


@dataclass(frozen=True, slots=True)
class Record:
    """A worker that `up` has started. key, by: of the machine that had it started. started: seconds since 1970."""

    pid: int
    started: float
    port: int
    key: str
    by: str
    versions: Versions

    def encode(self) -> str:
        return _RECORD.dump_json(self).decode()


_RECORD = pydantic.TypeAdapter(Record)


def decode(text: str | None) -> Record | None:
    """The record in a file's text; ``None``: it holds none."""
    try:
        record: Record | None = None if text is None else _RECORD.validate_json(text)
    except ValueError:
        return None
    return record


def command_of(words: Sequence[str]) -> Command | None:
    """The worker's command in a command line; ``None``: it is none.

    >>> command_of(["/x/bin/python3", "-m", "splitinfer", "worker", "--host", "0.0.0.0", "--port=7000"])
    Command(host='0.0.0.0', port=7000, is_insecure=False)
    """
    at = next((i for i, word in enumerate(words[:-1]) if _is_program(words, i) and words[i + 1] == "worker"), None)
    if at is None:
        return None
    options = words[at + 2 :]
    if "--child" in options:
        return None
    port = _value(options, "--port") or str(DEFAULT_PORT)
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    return Command(_value(options, "--host") or "127.0.0.1", number, "--insecure" in options)


def _is_program(words: Sequence[str], at: int) -> bool:
    """Whether a word is what is run, and not an argument of another program, such as an editor."""
    if at > 0 and words[at - 1] == "-m":
        return words[at] == "splitinfer"
    return PurePath(words[at]).name == "splitinfer" and at <= 1  # a script: by itself, or behind its interpreter


def _value(options: Sequence[str], name: str) -> str | None:
    for i, word in enumerate(options):
        if word == name and i + 1 < len(options):
            return options[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def own_workers(processes: Iterable[Process]) -> dict[int, tuple[Process, Command]]:
    """The workers of this user, by port."""
    pairs = [(each, command_of(each.words)) for each in processes if each.is_own]
    return {command.port: (each, command) for each, command in pairs if command is not None}


def others_workers(processes: Iterable[Process]) -> dict[int, str]:
    """The workers of other users: who has which port."""
    pairs = [(each, command_of(each.words)) for each in processes if not each.is_own]
    return {command.port: each.user for each, command in pairs if command is not None}


def holds(record: Record | None, process: Process) -> bool:
    """Whether a record is about a process."""
    return record is not None and record.pid == process.pid and abs(record.started - process.started) < _SAME_START


def from_ps(text: str) -> dict[int, tuple[str, ...]]:
    """Command lines by process id, as ``ps -axww -o pid= -o command=`` prints them (ps(1), macOS and Linux); words with
    spaces in them fall apart, which options of a worker survive.

    >>> from_ps("  12 /x/python -m splitinfer worker\\n")
    {12: ('/x/python', '-m', 'splitinfer', 'worker')}
    """
    rows = (line.split() for line in text.splitlines())
    return {int(row[0]): tuple(row[1:]) for row in rows if len(row) > 1 and row[0].isdigit()}
