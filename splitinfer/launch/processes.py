"""The processes of this machine, and their connections.

The command line of another user's process is anybody's to read on Linux. macOS gives it to its owner and to root alone
(psutil's documentation, ``Process.cmdline``), and to ``ps``, which runs as root there.
"""

import contextlib
import getpass
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil

from splitinfer.errors import ConfigError
from splitinfer.launch.workers import Process, from_ps

_PS = ("ps", "-axww", "-o", "pid=", "-o", "command=")
_SECONDS = 10.0
_POLL = 0.05


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
            _PS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return from_ps(done.stdout)


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
