"""Finds, watches and ends the processes of this machine that are workers.

A worker is a process of splitinfer with the command `worker` (``system.processes``). Workers that a coordinator started
for itself (``--child``) do not count, and neither does `worker --detach`, which only starts one. A background worker's
command line names the machine that asked for it, so that this is known as long as the process runs.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from splitinfer.common.endpoint import WORKER_PORT, is_loopback
from splitinfer.errors import ConfigError
from splitinfer.keyring import Known
from splitinfer.system.processes import Process, command_in

_NO_WORKER = ("--child", "--detach", "--stop", "--show")
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A worker's command line. ``by``: key and name of the machine whose `up` started it in the background, both empty
    if a person did; None if it is not in the background. ``versions``: the versions installed at its start."""

    host: str = "127.0.0.1"
    port: int = WORKER_PORT
    is_insecure: bool = False
    by: Known | None = None
    versions: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        return is_loopback(self.host)


def command_of(words: Sequence[str]) -> WorkerCommand | None:
    """Return the worker's command in a command line, or None if it is not a worker's.

    >>> command_of(["/x/bin/python3", "-m", "splitinfer", "worker", "--host", "0.0.0.0", "--port=7000"])
    WorkerCommand(host='0.0.0.0', port=7000, is_insecure=False, by=None, versions='')
    """
    command, *options = command_in(words) or ("",)
    if command != "worker" or not set(options).isdisjoint(_NO_WORKER):
        return None
    port = _value(options, "--port") or str(WORKER_PORT)
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    by, versions = _value(options, "--by"), _value(options, "--versions") or ""
    asker = None if by is None else Known(*by.partition(":")[::2])
    return WorkerCommand(_value(options, "--host") or "127.0.0.1", number, "--insecure" in options, asker, versions)


def _value(options: Sequence[str], name: str) -> str | None:
    for i, word in enumerate(options):
        if word == name and i + 1 < len(options):
            return options[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def own_workers(processes: Iterable[Process]) -> dict[int, tuple[Process, WorkerCommand]]:
    """Return the workers among some processes, by port."""
    pairs = [(each, command_of(each.words)) for each in processes]
    return {command.port: (each, command) for each, command in pairs if command is not None}


# ----- the processes -------------------------------------------------------------------------------


def memory_of(pid: int) -> int:
    """Return the bytes that a process holds, or 0 if they are unknown."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def peers_of(pid: int, port: int) -> tuple[str, ...]:
    """Return the addresses that are connected to a process's port."""
    with contextlib.suppress(psutil.Error):
        found = {
            each.raddr.ip
            for each in _connections(psutil.Process(pid))
            if each.raddr and each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        }
        return tuple(sorted(found))
    return ()


def listens(pid: int, port: int) -> bool:
    """Return whether a process of this user listens on a port."""
    with contextlib.suppress(psutil.Error):
        found = _connections(psutil.Process(pid))
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
    return False


def listener_on(port: int) -> str:
    """Return the name of this user's program that listens on a port, or an empty text."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if listens(process.pid, port):
                return process.name()
    return ""


def _connections(process: psutil.Process) -> Iterator[Any]:
    look = getattr(process, "net_connections", None) or process.connections  # the name until psutil 6
    yield from look(kind="tcp")


def end(pid: int, patience: float) -> None:
    """End a process by SIGTERM, and by SIGKILL after ``patience`` seconds; return once it has ended.

    Raises:
        ConfigError: it belongs to another user, or does not end.
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
    """Wait until a process ends. Return whether it has ended. A zombie counts as ended: in a container, nobody may
    collect it."""
    give_up = time.monotonic() + patience
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > give_up:
            return False
        time.sleep(_POLL)
    return True
