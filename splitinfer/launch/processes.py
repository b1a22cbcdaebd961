"""The processes of this machine, and which of them are workers.

A worker is known by its command line: ``.../splitinfer worker ...`` or ``python -m splitinfer worker ...``. Workers
that a coordinator started for itself (``--child``) are its own business, and `worker --detach` starts one without being
one. A record of `up` is believed only while a process with its number runs that is a worker and began when the record
says: numbers are used again.

The command line of another user's process is anybody's to read on Linux. macOS gives it to its owner and to root alone
(psutil's documentation, ``Process.cmdline``), and to ``ps``, which runs as root there.
"""

import contextlib
import getpass
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import psutil
import pydantic

from splitinfer.core.endpoint import WORKER_PORT, is_loopback
from splitinfer.errors import ConfigError
from splitinfer.wire.messages import Versions

_SAME_START = 2.0  # seconds by which two readings of one process's start may differ, when clocks are set
_NO_WORKER = ("--child", "--detach", "--stop", "--show")
_PS = ("ps", "-axww", "-o", "pid=", "-o", "command=")
_SECONDS = 10.0
_POLL = 0.05


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
    port: int = WORKER_PORT
    is_insecure: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine reaches it."""
        return is_loopback(self.host)


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
    """The record in a file's text; ``None``: there is none."""
    try:
        record: Record | None = None if text is None else _RECORD.validate_json(text)
    except ValueError:
        return None
    return record


def command_of(words: Sequence[str]) -> Command | None:
    """The worker's command in a command line; ``None``: it is another program's.

    >>> command_of(["/x/bin/python3", "-m", "splitinfer", "worker", "--host", "0.0.0.0", "--port=7000"])
    Command(host='0.0.0.0', port=7000, is_insecure=False)
    """
    at = next((i for i, word in enumerate(words[:-1]) if _is_program(words, i) and words[i + 1] == "worker"), None)
    if at is None:
        return None
    options = words[at + 2 :]
    if not set(options).isdisjoint(_NO_WORKER):
        return None
    port = _value(options, "--port") or str(WORKER_PORT)
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


# ----- what acts -----------------------------------------------------------------------------------


def processes() -> list[Process]:
    """All processes that can be seen and have a command line."""
    own = getpass.getuser()
    read = [each.info for each in psutil.process_iter(["pid", "username", "cmdline", "create_time"])]
    hidden = any(info["cmdline"] is None for info in read)
    shown = _shown_by_ps() if hidden else {}
    return [
        Process(
            info["pid"],
            info["username"] or "",
            info["username"] == own,
            tuple(info["cmdline"] or shown.get(info["pid"], ())),
            info["create_time"] or 0.0,
        )
        for info in read
        if info["cmdline"] or info["pid"] in shown
    ]


def _shown_by_ps() -> dict[int, tuple[str, ...]]:
    try:
        done = subprocess.run(
            _PS, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_SECONDS, text=True,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return from_ps(done.stdout)


def from_ps(text: str) -> dict[int, tuple[str, ...]]:
    """Command lines by process id, as ``ps -axww -o pid= -o command=`` prints them (ps(1), macOS and Linux); words with
    spaces in them fall apart, which options of a worker survive.

    >>> from_ps("  12 /x/python -m splitinfer worker\\n")
    {12: ('/x/python', '-m', 'splitinfer', 'worker')}
    """
    rows = (line.split() for line in text.splitlines())
    return {int(row[0]): tuple(row[1:]) for row in rows if len(row) > 1 and row[0].isdigit()}


def memory_of(pid: int) -> int:
    """Bytes that a process holds; 0 if that cannot be seen."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def peers_of(pid: int, port: int) -> tuple[str, ...]:
    """The addresses that are connected to a process's port."""
    with contextlib.suppress(psutil.Error):
        found = {
            each.raddr.ip
            for each in _connections(psutil.Process(pid))
            if each.raddr and each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        }
        return tuple(sorted(found))
    return ()


def listens(pid: int, port: int) -> bool:
    """Whether a process of this user listens on a port."""
    with contextlib.suppress(psutil.Error):
        found = _connections(psutil.Process(pid))
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
    return False


def listener_on(port: int) -> str:
    """Which program of this user listens on a port; empty if none does that can be seen."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if listens(process.pid, port):
                return process.name()
    return ""


def _connections(process: psutil.Process) -> Iterator[Any]:
    look = getattr(process, "net_connections", None) or process.connections  # the name until psutil 6
    yield from look(kind="tcp")


def start_of(pid: int) -> float:
    """When a process was started, in seconds since 1970; 0 if it is gone."""
    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return 0.0


def end(pid: int, patience: float) -> None:
    """End a process by SIGTERM, and by SIGKILL after ``patience`` seconds; return when it runs no more.

    Raises:
        ConfigError: it is of another user, or does not end.
    """
    try:
        process = psutil.Process(pid)
        for ask in (process.terminate, process.kill):
            ask()
            if _ends(process, patience):
                return
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        raise ConfigError(f"process {pid} cannot be ended: {error}") from error
    raise ConfigError(f"process {pid} does not end, not even by SIGKILL")


def _ends(process: psutil.Process, patience: float) -> bool:
    """Wait until a process runs no more; whether it does not. In a container nobody may take note of its end, and it
    stays in the list of processes as a zombie."""
    give_up = time.monotonic() + patience
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > give_up:
            return False
        time.sleep(_POLL)
    return True
