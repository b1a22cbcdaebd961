"""Links that come and go on one group, on emulated JACCL (`tests.emulation.jaccl`), which keeps count of what its
devices hold and of what dead processes leave there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from contract import QUICK, SECONDS, number, numbered, reason_at, until
from echoes import echo
from interrupts import freeze

import transports
from tests.emulation.jaccl.world import VARIABLE, World
from transports import Frame, Link, LinkClosed, LinkOptions, Listener, TransportUnavailable
from transports.rdma import child_process, groups, leftovers
from transports.rdma.groups import kept_groups

HERE, THERE = "rdma_en0", "rdma_en1"


def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> World:
    world = World.make(tmp_path / "world", **options)
    monkeypatch.setenv(VARIABLE, str(world.folder))
    return world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


@pytest.fixture
def listener(world: World) -> Iterator[Listener]:
    with transports.listen(world.address(), options=QUICK) as listener:
        yield listener


def joined(listener: Listener, options: LinkOptions = QUICK) -> tuple[Link, Link]:
    here = transports.connect(listener.address, timeout=SECONDS, options=options)
    return here, listener.accept(SECONDS)


def pids(*links: Link) -> list[int]:
    return [one.child_pid for one in links]  # type: ignore[attr-defined]


def exchange(here: Link, there: Link) -> None:
    """Frames of one message and of many, in both directions."""
    for index in range(3):
        here.send(numbered(index))
        assert number(there.recv(SECONDS)) == index
        there.send(numbered(index))
        assert number(here.recv(SECONDS)) == index
    data = os.urandom(300_000)
    here.send(Frame(b"", (data,)))
    assert memoryview(there.recv(SECONDS).parts[0]) == memoryview(data)


def reason_after_all(one: Link) -> str:
    """Why a link ended, after the frames that came before."""
    try:
        while True:
            one.recv(SECONDS)
    except LinkClosed as ending:
        return ending.reason


def parked() -> set[int]:
    """The children of the groups that are kept."""
    return {group.process.pid for group in kept_groups._kept}


# -- groups that are kept ----------------------------------------------------------------------------------------------


def _unread(here: Link, there: Link) -> None:
    """What is under way when the link ends is dropped, and is not of the next link."""
    for index in range(50):
        here.send(Frame(index.to_bytes(4, "little"), (bytes(100_000),)))
    there.close("enough")


def _within_a_frame(here: Link, there: Link) -> None:
    """The writer waits for room in the middle of a frame."""
    there.deliver_to(lambda _: time.sleep(0.05))
    sending = threading.Thread(target=_quietly, args=(lambda: here.send(Frame(b"", (bytes(40 << 20),))),))
    sending.start()
    time.sleep(0.05)
    here.abort()
    sending.join(SECONDS)
    assert not sending.is_alive()


def _quietly(action: Callable[[], None]) -> None:
    with suppress(LinkClosed):
        action()


ENDINGS: dict[str, Callable[[Link, Link], None]] = {
    "the writer closes": lambda here, there: here.close("bye"),
    "the reader closes": lambda here, there: there.close("bye"),
    "the writer aborts": lambda here, there: here.abort(),
    "the reader aborts": lambda here, there: there.abort(),
    "both close": lambda here, there: [one.close("bye") for one in (there, here)] and None,
    "at rest": lambda here, there: (time.sleep(0.4), there.close("bye"))[0],  # longer than _REST_SECONDS_RDMA
    "unread": _unread,
    "within a frame": _within_a_frame,
    "the control link is lost": lambda here, there: here._control.abort(),  # type: ignore[attr-defined]
}


def test_a_group_outlives_its_links_however_they_end(world: World, listener: Listener) -> None:
    first: list[int] = []
    for ending, end in ENDINGS.items():
        here, there = joined(listener)
        first = first or pids(here, there)
        assert pids(here, there) == first, f"before: {ending}"
        exchange(here, there)
        end(here, there)
        for one in (here, there):
            until(lambda one=one: one.closed is not None, ending)  # type: ignore[misc]
    here, there = joined(listener)
    assert pids(here, there) == first
    exchange(here, there)
    for device in (HERE, THERE):
        usage = world.usage(device)
        assert (usage.num_alive, usage.num_left, usage.num_groups) == (1, 0, 1)
        assert world.overlaps(device) == 0
    assert leftovers.read() == ()


# -- groups that are not -----------------------------------------------------------------------------------------------


def _freeze(one: Link) -> None:
    freeze(psutil.Process(pids(one)[0]))


def test_groups_are_not_kept_for_ever(world: World, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_groups, "keep_seconds", 0.05)
    here, there = joined(listener)
    children = [psutil.Process(pid) for pid in pids(here, there)]
    here.close()
    reason_at(there)
    until(lambda: not any(child.is_running() for child in children), "the children end")
    assert world.usage(HERE).num_alive == world.usage(THERE).num_alive == 0
    assert leftovers.read() == ()


# -- one link a device -------------------------------------------------------------------------------------------------


def test_a_device_carries_one_link(world: World, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CLAIM_SECONDS", 0.05)
    here, there = joined(listener)
    with pytest.raises(TransportUnavailable, match=f"{HERE} carries a link of this process already"):
        transports.connect(listener.address, timeout=SECONDS, options=QUICK)
    exchange(here, there)
    here.abort()


# -- who is killed in a receive ----------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["connector", "listener"])
def test_a_process_that_is_killed_leaves_nobody_in_a_receive(side: str, world: World) -> None:
    """However busy: its own child and the peer's come out of the group, since each end has somebody to say so."""
    with echo(side, QUICK, world.address()) as (here, child):
        for _ in range(20):
            here.send(Frame(b"x", (bytes(200_000),)))
        child.kill()
        reason_after_all(here)
        until(lambda: parked() == set(pids(here)), "our end parks its child")
    kept_groups.end_all()
    until(lambda: world.usage(HERE).num_alive + world.usage(THERE).num_alive == 0, "all children end")
    assert world.usage(HERE).num_left == world.usage(THERE).num_left == 0
    assert leftovers.read() == ()


def test_who_had_to_be_killed_in_a_receive_is_counted(
    world: World, listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer's machine is gone, as far as the reader can tell: nobody says that nothing follows."""
    monkeypatch.setattr(child_process, "LEAVE_SECONDS", 0.2)
    here, there = joined(listener)
    reader = pids(there)[0]
    exchange(here, there)
    with caplog.at_level(logging.WARNING, "transports"):
        _freeze(here)
        there.abort()
        until(lambda: not psutil.pid_exists(reader), "the reader ends")
        until(lambda: len(leftovers.read()) == 2, "both are counted: neither came out by itself")
    assert world.usage(THERE).num_left == 1
    assert f"process {reader} was killed inside an RDMA operation on {THERE}" in caplog.text
    assert "restart this machine if RDMA links fail" in leftovers.warning(leftovers.read())
    with pytest.raises(TransportUnavailable, match=r"no memory regions left.*restart this Mac.*1 process was killed"):
        joined(listener)


# -- who may not -------------------------------------------------------------------------------------------------------
