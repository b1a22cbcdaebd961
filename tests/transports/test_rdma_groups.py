"""Groups and the links that come and go on them, on emulated JACCL (`transports.emulated_jaccl`), which keeps count of
what dead processes leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from contract import QUICK, SECONDS, number, numbered, reason_at, until
from echoes import process

import transports
from transports import Frame, Link, Listener, TransportUnavailable
from transports.emulated_jaccl.world import VARIABLE, MixedSizes, World
from transports.rdma import child_process, groups, leftovers, link
from transports.rdma.groups import kept_groups

HERE, THERE = "rdma_en0", "rdma_en1"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World.make(tmp_path / "world", mixed_sizes=MixedSizes.WORK)
    monkeypatch.setenv(VARIABLE, str(world.folder))
    yield world
    kept_groups.end_all()


@pytest.fixture
def listener(world: World) -> Iterator[Listener]:
    with transports.listen(world.address(), options=QUICK) as listener:
        yield listener


def joined(listener: Listener) -> tuple[Link, Link]:
    here = transports.connect(listener.address, timeout=SECONDS, options=QUICK)
    there = listener.accept(SECONDS)
    return here, there


def pids(*links: Link) -> list[int]:
    assert all(isinstance(one, link.RdmaLink) for one in links)
    return [one.child_pid for one in links]  # type: ignore[attr-defined]


def exchange(here: Link, there: Link, count: int = 3) -> None:
    for index in range(count):
        here.send(numbered(index))
        assert number(there.recv(SECONDS)) == index
        there.send(numbered(index))
        assert number(here.recv(SECONDS)) == index


def test_try(world, listener):
    t = time.monotonic()
    here, there = joined(listener)
    print("joined", time.monotonic() - t)
    exchange(here, there)
    first = pids(here, there)
    for how in range(3):
        t = time.monotonic()
        (here if how % 2 else there).close("bye")
        print("closed", time.monotonic() - t, reason_at(here), reason_at(there))
        t = time.monotonic()
        here, there = joined(listener)
        print("joined", time.monotonic() - t, pids(here, there) == first)
        exchange(here, there)
    here.abort()
    print(world.usage(HERE), world.usage(THERE))
