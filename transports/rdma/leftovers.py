"""How many processes of RDMA groups were killed inside an operation since this machine started.

A process killed while it waits in JACCL's receive is reported to leave its memory wired until a restart (mlx#3910), and
with it the memory regions that it had registered: 64 of the about 100 that a device has (mlx#3162). So after one or two
of them every further group on that device fails, and only a restart helps. Nothing on the machine tells how many there
were; so each is written down, by whoever kills it, for the user to be told.

One file, a line for each: the device, the process, the time. Its name holds the identity of this start of the system,
so a restart begins a new one, and whoever writes it removes those of earlier starts. Several processes may write at
once: a line is one write to the end. What cannot be written is left out: it must never keep a link from ending."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("transports")

REGIONS_OF_GROUP, REGIONS_OF_DEVICE = 64, 100
_PREFIX = "killed-"
_TOOL_SECONDS = 5.0


class Killed(NamedTuple):
    """A process that was killed inside an operation of its group."""

    device: str
    pid: int


def folder() -> Path:
    """Where the state of RDMA devices is kept: splitinfer/rdma in $XDG_CACHE_HOME if that is set, else in
    ~/Library/Caches (macOS) or ~/.cache."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / usual) / "splitinfer" / "rdma"


@cache
def boot_id() -> str:
    """What identifies this start of the system; "unknown" if it does not tell.

    From /proc/sys/kernel/random/boot_id (random(4)) or `sysctl -n kern.bootsessionuuid`, which XNU makes anew at each
    start.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "linux":
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout.strip()
    return "unknown"


def record(device: str, pid: int, where: Path | None = None, boot: str | None = None) -> None:
    """Write down that the process `pid` is being killed inside an operation on `device`, and log what that may mean.
    Raises nothing."""
    log.warning(
        "process %d was killed inside an RDMA operation on %s: wired memory may stay until a restart of this Mac "
        "(mlx#3910)",
        pid,
        device,
    )
    where, name = where or folder(), _PREFIX + (boot or boot_id())
    try:
        where.mkdir(parents=True, exist_ok=True)
        with (where / name).open("a", encoding="ascii") as file:
            file.write(f"{device} {pid} {time.time():.0f}\n")
        for old in where.glob(_PREFIX + "*"):
            if old.name != name:
                old.unlink(missing_ok=True)
    except (OSError, ValueError) as problem:
        log.info("that could not be written down in %s: %s", where, problem)


def read(where: Path | None = None, boot: str | None = None) -> tuple[Killed, ...]:
    """Those killed since the system started, oldest first. Raises nothing; damaged lines are left out."""
    try:
        text = ((where or folder()) / (_PREFIX + (boot or boot_id()))).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ()
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            device, pid, _ = line.split()
            found.append(Killed(device, int(pid)))
    return tuple(found)


def warning(killed: Sequence[Killed]) -> str:
    """What they may have left, as a sentence for the user; "" where nobody was killed."""
    if not killed:
        return ""
    devices = Counter(each.device for each in killed)
    where = ", ".join(f"{name} {count}" for name, count in sorted(devices.items()))
    were, each = ("process was", "it") if len(killed) == 1 else ("processes were", "each")
    return (
        f"{len(killed)} {were} killed inside an RDMA operation since this machine started ({where}); {each} may hold "
        f"{REGIONS_OF_GROUP} of the about {REGIONS_OF_DEVICE} memory regions of its device, and wired memory: restart "
        "this machine if RDMA links fail"
    )


def hint(device: str, where: Path | None = None, boot: str | None = None) -> str:
    """The part of a failed join's reason that says what earlier kills on `device` may have to do with it; "" without
    any."""
    count = sum(each.device == device for each in read(where, boot))
    if not count:
        return ""
    were = "1 process was" if count == 1 else f"{count} processes were"
    return f"{were} killed inside an RDMA operation on {device} since this machine started, so restart it"
