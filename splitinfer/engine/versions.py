"""The versions of this process, which a handshake compares first, and the names of the machine and its device."""

import platform
from functools import cache
from importlib.metadata import version

import mlx.core as mx

from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu
from splitinfer.wire.messages import PROTOCOL_VERSION, Versions


@cache
def own_versions() -> Versions:
    """Return the versions of this process."""
    return Versions(PROTOCOL_VERSION, version("splitinfer"), version("mlx"), version("mlx-lm"))


def machine_name() -> str:
    """Return this machine's name, for messages to people."""
    return platform.node() or "this machine"


def device_name() -> str:
    """Return the name of the device that stages compute on: a GPU's name, "emulated accelerator", or "cpu"."""
    if emulated_machine() is not None:
        return "emulated accelerator"
    if not on_gpu():
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))
