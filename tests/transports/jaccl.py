"""Links over emulated JACCL (`tests.emulation.jaccl`), for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from contract import SECONDS
from processes import until

from tests.emulation.jaccl.world import World
from transports import Frame, Link, LinkClosed
from transports.rdma import transport
from transports.rdma.link import RdmaLink

WRITER, READER = "rdma_en0", "rdma_en1"


def make_world(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> World:
    """Emulated devices for this test and all processes that it starts.

    Writers do not rest, so that a planned fault meets what the test sends.
    """
    world = World.make(folder / "jaccl", **options)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(transport.REST_SECONDS, "jaccl", 60.0)
    return world


def all_received(link: Link) -> tuple[list[Frame], str]:
    """What arrives until the end, and the reason of the end."""
    frames: list[Frame] = []
    try:
        while True:
            frames.append(link.recv(SECONDS))
    except LinkClosed as ending:
        return frames, ending.reason


def child_of(one: Link) -> psutil.Process:
    """The process that carries this end."""
    assert isinstance(one, RdmaLink)
    return psutil.Process(one._process.pid)


def until_free(world: World) -> None:
    """Wait until the links' processes have ended."""
    until(lambda: all(world.usage(device).num_alive == 0 for device in world.ports), "the devices are free")


def carriers_of(pid: int) -> list[psutil.Process]:
    """The children of a process and of its children that are members of groups."""
    return [child for child in psutil.Process(pid).children(recursive=True) if is_carrier(child)]


def is_carrier(one: psutil.Process) -> bool:
    try:
        return "transports.rdma.child" in one.cmdline()
    except psutil.Error:  # it has ended
        return False
