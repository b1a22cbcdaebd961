"""Checks whether this machine can use a backend; if not, the reason is one sentence for the user.

Only this machine's requirements are checked: whether the cable leads to the right machine shows when a group is joined.
In tests the machine may be an emulated one (`tests.emulation.jaccl`).

RDMA over Thunderbolt came with macOS 26.2 (Apple's TN3205). JACCL cuts a message into frames of 4 KiB before macOS
26.3, and of up to 512 KiB from there on (`buffer_size_from_message` in MLX's rdma.h). Two ends that cut differently
wait for each other for ever, so such a pair is refused before a group is joined. macOS 26 calls itself 16 to a program
built with an older SDK, as Python is. Not run on a Mac.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from transports.base import TransportUnavailable
from transports.emulation import emulator
from transports.rdma.address import JACCL

ACTIVE = "PORT_ACTIVE"
_EMULATED = "SPLITINFER_EMULATED_JACCL"
_TOOL_SECONDS = 5.0  # ibv_devinfo was seen to hang


def emulated() -> Any | None:
    """Return the emulated machines of a test, if the environment names them."""
    if not os.environ.get(_EMULATED):
        return None
    return emulator("jaccl.world").World.of_this_process()


def device_for(backend: str, wanted: str = "") -> str:
    """Return the device over which `backend` can be used here: `wanted`, or the only one whose port is active; "" for
    ring.

    Raises:
        TransportUnavailable: the backend cannot be used; the message says why.
    """
    if backend == JACCL and (reason := why_too_old(macos_version(wanted))) is not None:
        raise TransportUnavailable(reason)
    if not _is_available(backend):
        wheel = ": it needs the wheel for macOS 26" if backend == JACCL else ""
        raise TransportUnavailable(f"this build of MLX has no {backend}{wheel}")
    if backend != JACCL:
        return ""
    try:
        listed, states = parse_devices(_output("ibv_devices")), parse_states(_output("ibv_devinfo"))
    except (OSError, subprocess.SubprocessError) as problem:
        raise TransportUnavailable(f"the RDMA devices cannot be listed: {problem}") from problem
    return pick(wanted, listed, [device for device, state in states.items() if state == ACTIVE])


def is_down(device: str) -> bool:
    """Return whether the port of an RDMA device is known to be inactive, as when its cable is out."""
    try:
        return parse_states(_output("ibv_devinfo")).get(device, ACTIVE) != ACTIVE
    except (OSError, subprocess.SubprocessError):
        return False


def _is_available(backend: str) -> bool:
    if backend == JACCL and emulated() is not None:
        return True
    import mlx.core as mx  # here, so that processes that do not use rdma:// need not load it

    return mx.distributed.is_available(backend)


def pick(wanted: str, listed: Sequence[str], active: Sequence[str]) -> str:
    """Return the device to use, given the listed and the active ones (`device_for`)."""
    reason = ""
    if not listed:
        reason = "ibv_devices lists no RDMA device: it takes Thunderbolt 5, and `rdma_ctl enable` in Recovery"
    elif wanted and wanted not in listed:
        reason = f"there is no RDMA device {wanted}; ibv_devices lists {', '.join(listed)}"
    elif wanted and wanted not in active:
        reason = f"the port of {wanted} is not active: is the cable in, and RDMA enabled at both ends?"
    elif not active:
        reason = f"no port of {', '.join(listed)} is active: is a cable in, and RDMA enabled at both ends?"
    elif not wanted and len(active) > 1:
        reason = f"{', '.join(active)} are active: name the one that leads to the other machine"
    if reason:
        raise TransportUnavailable(reason)
    return wanted or active[0]


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the device names in the output of `ibv_devices`. Raises nothing."""
    return tuple(re.findall(r"^\s*(\w+)\s+[0-9a-fA-F]{16}\s*$", text, re.MULTILINE))


def parse_states(text: str) -> dict[str, str]:
    """Return each device's port state in the output of `ibv_devinfo`: PORT_ACTIVE, PORT_DOWN ... Raises nothing."""
    found: dict[str, str] = {}
    device = None
    for line in text.splitlines():
        name, _, value = line.strip().partition(":")
        if name == "hca_id":
            device = value.strip()
        elif name == "state" and device and value.split():
            found.setdefault(device, value.split()[0])
    return found


def macos_version(device: str = "") -> str:
    """Return this machine's macOS version, such as `26.3.1`, or "" on another system.

    `device`: chooses the emulated Mac; a real machine ignores it.
    """
    if (world := emulated()) is not None:
        return str(world.macos(device))
    return platform.mac_ver()[0] if sys.platform == "darwin" else ""


def _output(tool: str) -> str:
    if (world := emulated()) is not None:
        return str(world.output(tool))
    return subprocess.run([tool], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout


LEAST = (26, 2)  # has RDMA over Thunderbolt
LONG_FRAMES = (26, 3)  # JACCL's frames may be longer than 4 KiB
_COMPATIBLE, _TAHOE = 16, 26


def parse_version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as 26.3.1, or None if it does not begin with a number."""
    found = re.match(r"(\d{1,4})(?:\.(\d{1,4}))?(?!\d)", text, re.ASCII)
    if found is None:
        return None
    major = int(found[1])
    return _TAHOE if major == _COMPATIBLE else major, int(found[2] or 0)


def why_too_old(text: str, subject: str = "this") -> str | None:
    """Return None if a Mac with this version has RDMA over Thunderbolt, else the reason as a sentence."""
    version = parse_version(text)
    if version is not None and version >= LEAST:
        return None
    found = "another system" if version is None else f"{version[0]}.{version[1]}"
    return f"RDMA over Thunderbolt needs macOS 26.2 or later, and {subject} is {found}"


def why_not_together(here: str, there: str) -> str | None:
    """Return None if two ends with these versions can share a group, else the reason as a sentence."""
    reason = why_too_old(here, "one end") or why_too_old(there, "the other end")
    if reason is not None:
        return reason
    older, newer = sorted((parse_version(here) or LEAST, parse_version(there) or LEAST))
    if (older < LONG_FRAMES) is (newer < LONG_FRAMES):
        return None
    return (
        f"the two Macs have macOS {older[0]}.{older[1]} and {newer[0]}.{newer[1]}, and RDMA's frames have other sizes "
        "from 26.3 on: update the older one"
    )
