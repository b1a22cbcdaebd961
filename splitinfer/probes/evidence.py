"""What findings on this machine are made from: what the system's commands print, and what else can be looked at.

All commands run at once, each with a timeout: one that is missing or hangs does no harm.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import psutil

from splitinfer.common.endpoint import Endpoint, is_loopback
from splitinfer.core.layout import Layout
from splitinfer.errors import ConfigError
from splitinfer.models.memory import on_gpu
from splitinfer.probes.parsing import NVIDIA_FIELDS
from splitinfer.system.command import NOT_FOUND, TIMED_OUT, run
from splitinfer.system.free_memory import MemoryPages, memory_pages, wired_limit_bytes
from splitinfer.system.interface_kind import LocalInterface
from splitinfer.system.interfaces import local_interfaces, source_towards
from splitinfer.system.origin import ProcessOrigin, Start, this_process
from splitinfer.system.processes import Process, processes

T = TypeVar("T")

SECONDS = 15.0  # for a command; system_profiler takes a few, and ibv_devinfo has been seen to hang for ever
TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_COMPUTE = frozenset({"worker", "coord", "chat", "serve", "up", "bench"})  # commands

MACOS: Mapping[str, tuple[str, ...]] = {
    "macos": ("/usr/bin/sw_vers", "-productVersion"),
    "power": ("/usr/bin/pmset", "-g"),
    "firewall": (TOOL, "--getglobalstate"),
    "firewall_apps": (TOOL, "--listapps"),
    "thunderbolt": ("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"),
    "hardware_ports": ("/usr/sbin/networksetup", "-listallhardwareports"),
    "interfaces": ("/sbin/ifconfig",),
    "rdma": ("rdma_ctl", "status"),
    "states": ("ibv_devinfo",),
}
LINUX: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"),
}
COMMANDS = {"Darwin": MACOS, "Linux": LINUX}


@dataclass(frozen=True, slots=True)
class Printed:
    """The text that a command printed; ``None`` where it failed, and ``why``."""

    text: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class WayThere:
    """How a worker is reached. ``host``: as the layout names it; ``address``: its number; ``own``: this machine's on
    the way there; ``None``: there is no way."""

    worker: str
    host: str
    address: str
    own: str | None


@dataclass(frozen=True, slots=True)
class SeenHere:
    """The evidence: the commands' outputs, by name, and what this process knows of itself and of the machine.

    memory, available, swapped: bytes. pages: what macOS counts of them. wired_limit: the owner's, in bytes; ``None``:
        it is macOS's own. battery: percent that are left, where the machine runs on it.
    on_gpu: whether MLX computes on a GPU.
    up: seconds since the machine was started. fast_synch: whether the user has set MLX's variable of that name.
    executable, prefix: the Python that runs this, links resolved.
    """

    outputs: Mapping[str, Printed]
    system: str  # "Darwin", "Linux" ...
    has_jaccl: bool
    memory: int = 0
    available: int = 0
    swapped: int = 0
    pages: MemoryPages | None = None
    wired_limit: int | None = None
    battery: int | None = None
    on_gpu: bool = False
    up: float = 0.0
    fast_synch: bool = False
    executable: str = ""
    prefix: str = ""
    origin: ProcessOrigin = field(default_factory=lambda: ProcessOrigin(Start.UNKNOWN))
    processes: tuple[Process, ...] = ()
    ways: tuple[WayThere, ...] = ()
    interfaces: tuple[LocalInterface, ...] = ()

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    def read(self, name: str, read: Callable[[str], T | None]) -> T | None:
        """Return what a command printed, parsed. Return None if it failed or was not run."""
        text = self.outputs[name].text if name in self.outputs else None
        return None if text is None else read(text)


def look(layout: Layout | None) -> SeenHere:
    """Return the evidence on this machine, before links are measured: local workers would be found among its
    processes."""
    system, memory = platform.system(), psutil.virtual_memory()
    return SeenHere(
        run_commands(COMMANDS.get(system, {})),
        system,
        has_jaccl=bool(mx.distributed.is_available("jaccl")),
        memory=int(memory.total),
        available=int(memory.available),
        swapped=int(psutil.swap_memory().used) if system == "Darwin" else 0,
        pages=memory_pages(),
        wired_limit=wired_limit_bytes(),
        battery=_battery(),
        on_gpu=on_gpu(),
        up=time.time() - psutil.boot_time(),
        fast_synch=os.environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"),
        executable=str(Path(sys.executable).resolve()),
        prefix=sys.base_prefix,
        origin=this_process(),
        processes=other_processes(),
        ways=ways_to(layout),
        interfaces=local_interfaces(),
    )


def _battery() -> int | None:
    found = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if found is None or found.power_plugged is not False else int(found.percent)


def run_commands(commands: Mapping[str, Sequence[str]], seconds: float = SECONDS) -> dict[str, Printed]:
    """Return the output of each command, by its key. ``seconds``: the timeout of each."""
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        return dict(zip(commands, pool.map(lambda each: run_command(each, seconds), commands.values()), strict=True))


def run_command(command: Sequence[str], seconds: float = SECONDS) -> Printed:
    """Return the standard output of one command, or why there is none."""
    done = run(command, seconds)
    if done.code == TIMED_OUT or (done.code and not done.output.strip()):
        is_own = done.code in (NOT_FOUND, TIMED_OUT)
        return Printed(None, done.why if is_own else f"{command[0].rpartition('/')[2]} failed: {done.why}")
    return Printed(done.output)


def ways_to(layout: Layout | None) -> tuple[WayThere, ...]:
    """Return how each worker of a layout on another machine is reached."""
    if layout is None:
        return ()
    ways = (_way(stage.name, str(stage.address)) for stage in layout.workers if not stage.is_local)
    return tuple(way for way in ways if way is not None)


def _way(name: str, address: str) -> WayThere | None:
    """Return the way to a worker. Return None if it is on this machine, or its name has no address."""
    try:
        at = Endpoint.parse(address)
        number = str(socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)[0][4][0])
    except (ConfigError, OSError, UnicodeError):  # it may be inproc://
        return None
    if is_loopback(number):
        return None
    return WayThere(name, at.host, number, source_towards(number))


def other_processes() -> tuple[Process, ...]:
    """Return the other processes of splitinfer that compute. Parents of this process do not count, nor do processes
    started by another one in the list, such as local workers."""
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    found = [each for each in processes() if each.pid not in own and not _COMPUTE.isdisjoint(each.command[:1])]
    running = {each.pid for each in found}
    return tuple(each for each in found if each.parent not in running)
