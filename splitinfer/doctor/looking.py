"""Looks at what findings need besides a machine's commands: the ways to workers, other processes, Linux's Wi-Fi."""

import platform
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import psutil

from splitinfer.core.layout import Layout
from splitinfer.doctor.commands import SECONDS, route_command, run_command
from splitinfer.doctor.findings.finding import OtherProcess, Way
from transports import AddressError
from transports.address import parse_host_port

_COMMANDS = ("worker", "coord", "chat", "serve", "bench")


def ways_to(layout: Layout | None) -> tuple[Way, ...]:
    """How each worker of a layout on another machine is reached."""
    if layout is None:
        return ()
    workers = [(stage.name, str(stage.address)) for stage in layout.stages[1:] if not stage.is_local]
    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        return tuple(way for way in pool.map(lambda worker: _way(*worker), workers) if way is not None)


def _way(name: str, address: str) -> Way | None:
    """The way to a worker; ``None`` where it is on this machine, or its name has no address."""
    try:
        host, port = parse_host_port(address)
        number = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (AddressError, OSError, UnicodeError):
        return None
    if number == "::1" or number.startswith("127."):
        return None
    return Way(name, host, number, run_command(route_command(platform.system(), number), SECONDS))


def other_processes() -> tuple[OtherProcess, ...]:
    """The other processes of splitinfer; not those that started this one, nor those that another of them started, as a
    coordinator starts local workers."""
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    running = {
        process.pid: (command, process.info["ppid"], process.info["nice"] or 0)
        for process in psutil.process_iter(["cmdline", "ppid", "nice"])
        if process.pid not in own and (command := command_of(process.info["cmdline"] or []))
    }
    return tuple(
        OtherProcess(pid, command, nice) for pid, (command, parent, nice) in running.items() if parent not in running
    )


def command_of(words: Sequence[str]) -> str:
    """The command of splitinfer that a process runs, from its command line; "" if it is another program.

    >>> command_of(["/x/.venv/bin/python", "/x/.venv/bin/splitinfer", "worker", "--port", "5577"])
    'worker'
    >>> command_of(["python", "-m", "splitinfer", "coord"]), command_of(["vim", "splitinfer"])
    ('coord', '')
    """
    for word, following in pairwise(words[:4]):
        if word.rpartition("/")[2] == "splitinfer" and following in _COMMANDS:
            return following
    return ""
