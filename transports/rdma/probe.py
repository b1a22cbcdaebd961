"""Whether this machine can carry frames over a backend, and if not, why not: one sentence for a person.

Looks at what must be there, no deeper: a cable that leads elsewhere shows when a group is joined.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from typing import NamedTuple

from transports.rdma.address import JACCL

_MACOS = (26, 2)
_TOOL_SECONDS = 5.0  # ibv_devinfo was seen to hang


def usable(backend: str, device: str = "") -> str | None:
    """None if `backend` can be used here, over `device` if one is named; else why not."""
    if backend == JACCL and (reason := _no_macos()) is not None:
        return reason
    import mlx.core as mx  # late: who never uses rdma:// should not load it for that

    if not mx.distributed.is_available(backend):
        return f"this build of MLX has no {backend}" + (": it needs the wheel for macOS 26" if backend == JACCL else "")
    if backend != JACCL:
        return None
    chosen = choose_device(device)
    return None if chosen.name else chosen.problem


class Choice(NamedTuple):
    """A device's name; or none, and why."""

    name: str
    problem: str = ""


def choose_device(wanted: str = "") -> Choice:
    """The RDMA device to use: the one that is wanted, or the only one whose port is active."""
    try:
        listed, active = parse_devices(_output("ibv_devices")), parse_active(_output("ibv_devinfo"))
    except (OSError, subprocess.SubprocessError) as problem:
        return Choice("", f"the RDMA devices cannot be listed: {problem}")
    return pick(wanted, listed, active)


def pick(wanted: str, listed: list[str], active: list[str]) -> Choice:
    """Of the devices there are."""
    if not listed:
        return Choice("", "ibv_devices lists no RDMA device: it takes Thunderbolt 5, and `rdma_ctl enable` in Recovery")
    if wanted and wanted not in listed:
        return Choice("", f"there is no RDMA device {wanted}; ibv_devices lists {', '.join(listed)}")
    if wanted and wanted not in active:
        return Choice("", f"the port of {wanted} is not active: is the cable in, and RDMA enabled at both ends?")
    if not active:
        return Choice("", f"no port of {', '.join(listed)} is active: is a cable in, and RDMA enabled at both ends?")
    if not wanted and len(active) > 1:
        return Choice("", f"{', '.join(active)} are active: name the one that leads to the other machine")
    return Choice(wanted or active[0])


def parse_devices(text: str) -> list[str]:
    """The names in what `ibv_devices` prints."""
    return re.findall(r"^\s+(rdma_\w+)\s", text, re.MULTILINE)


def parse_active(text: str) -> list[str]:
    """The devices in what `ibv_devinfo` prints that have an active port."""
    blocks = re.split(r"^hca_id:\s*", text, flags=re.MULTILINE)[1:]
    return [block.split(None, 1)[0] for block in blocks if re.search(r"state:\s+PORT_ACTIVE", block)]


def _no_macos() -> str | None:
    if sys.platform != "darwin":
        return "RDMA over Thunderbolt needs macOS 26.2 or later"
    version = platform.mac_ver()[0]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return None if numbers >= _MACOS else f"RDMA over Thunderbolt needs macOS 26.2 or later, and this is {version}"


def _output(tool: str) -> str:
    return subprocess.run([tool], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout
