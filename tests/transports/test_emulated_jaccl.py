"""The stand-in for JACCL by itself: it must be as bad as it says. Groups of two threads, no processes of links."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract import SECONDS, until

from tests.emulation.jaccl import group, wire
from tests.emulation.jaccl.group import EmulatedGroup, join
from tests.emulation.jaccl.world import World
from transports import TransportUnavailable
from transports.rdma import probe


def aside(action: Callable[..., Any], *args: Any) -> Future[Any]:
    """What `action` will return; a thread that hangs does so until the end of the test."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(action(*args))
        except BaseException as problem:  # noqa: BLE001 - the test wants it
            found.set_exception(problem)

    threads.append(threading.Thread(target=run, daemon=True))
    threads[-1].start()
    return found


threads: list[threading.Thread] = []
joined: list[Future[EmulatedGroup]] = []


@pytest.fixture(autouse=True)
def groups_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And so does what hangs."""
    is_over = threading.Event()

    def hang() -> None:
        is_over.wait()
        raise ConnectionError("the test is over")

    monkeypatch.setattr(group, "hang", hang)
    monkeypatch.setattr(wire, "hang", hang)
    yield
    for end in joined:
        with suppress(Exception):
            end.result(SECONDS).close()
    joined.clear()
    is_over.set()
    for thread in threads:
        thread.join(SECONDS)
    threads.clear()


def joining(world: World, devices: tuple[str, str] = ("rdma_en0", "rdma_en1")) -> list[Future[EmulatedGroup]]:
    boxes: list[queue.Queue[bytes]] = [queue.Queue(), queue.Queue()]

    def gather(rank: int, mine: bytes) -> bytes:
        boxes[rank].put(mine)
        theirs = boxes[1 - rank].get(timeout=SECONDS)
        return mine + theirs if rank == 0 else theirs + mine

    ends = [
        aside(join, world, device, rank, lambda mine, _size, rank=rank: gather(rank, mine))
        for rank, device in enumerate(devices)
    ]
    joined.extend(ends)
    return ends


def group_of_two(world: World) -> list[EmulatedGroup]:
    """Joined, and a sum made."""
    ends = [end.result(SECONDS) for end in joining(world)]
    sums = [aside(end.all_sum, [rank + 1.0]) for rank, end in enumerate(ends)]
    assert [each.result(SECONDS) for each in sums] == [[3.0], [3.0]]
    return ends


def message(size: int, seed: int = 1) -> memoryview:
    return memoryview(bytes([seed]) * size)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path / "world")


def test_a_send_during_a_receive_is_noticed(world: World) -> None:
    here, _there = group_of_two(world)
    aside(here.recv, 10)
    until(here._operation.locked, "it receives")
    with pytest.raises(RuntimeError, match="two operations at once"):
        here.send(message(10))
    assert world.overlaps("rdma_en0") == 1


def test_the_tools_show_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "world", num_cables=2, macos=("26.1", "26.3"))
    with pytest.raises(TransportUnavailable):  # no Mac, and not emulated
        probe.device_for("jaccl", "rdma_en1")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    assert probe.device_for("jaccl", "rdma_en1") == "rdma_en1"
    with pytest.raises(TransportUnavailable, match=r"needs macOS 26\.2 or later, and this is 26\.1"):
        probe.device_for("jaccl", "rdma_en0")
