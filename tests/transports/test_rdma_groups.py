"""Links that come and go on one group, on emulated JACCL (`transports.emulated_jaccl`), which keeps count of what its
devices hold and of what dead processes leave there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from contract import QUICK, SECONDS, number, numbered, reason_at, until
from echoes import EXIT, echo, process
from effort import long
from interrupts import freeze

import transports
from transports import Frame, Link, LinkClosed, LinkOptions, Listener, TransportUnavailable
from transports.emulated_jaccl.device import Limits
from transports.emulated_jaccl.world import VARIABLE, Fault, What, World
from transports.rdma import child_process, groups, handshake, leftovers
from transports.rdma.groups import kept_groups

HERE, THERE = "rdma_en0", "rdma_en1"
both_ends = pytest.mark.parametrize("end", [0, 1], ids=["writer", "reader"])


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


def all_out(children: Iterable[int]) -> None:
    """Wait until these children have ended or are parked."""
    until(
        lambda: {pid for pid in children if psutil.pid_exists(pid)} <= parked(),
        "the children come out of their group",
    )


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


def test_the_next_link_has_options_of_its_own(listener: Listener) -> None:
    here, there = joined(listener)
    here.close()
    reason_at(there)
    here, there = joined(listener, LinkOptions(beat_every=0.02, dead_after=2.0, checksum_parts=False))
    exchange(here, there)


def test_links_follow_each_other_at_once(world: World, listener: Listener) -> None:
    """The handshake meets links that are still ending, at either end."""
    children = set()
    for index in range(12):
        here, there = joined(listener)
        children.add(tuple(pids(here, there)))
        here.send(numbered(index))
        (here.abort if index % 2 else there.abort)()
    here, there = joined(listener)
    exchange(here, there)
    assert children == {tuple(pids(here, there))}
    assert world.usage(THERE).num_left == 0


def test_a_late_thread_of_an_earlier_link_has_no_part_in_the_next(listener: Listener) -> None:
    here, there = joined(listener)
    late = here._process, here._life  # type: ignore[attr-defined]
    there.close()
    reason_at(here)
    here, there = joined(listener)
    with pytest.raises(LinkClosed):
        late[0].post([b"late"], 1.0, late[1])
    late[0].stop(late[1])
    exchange(here, there)


# -- groups that are not -----------------------------------------------------------------------------------------------


def _kill(one: Link) -> None:
    psutil.Process(pids(one)[0]).kill()


def _freeze(one: Link) -> None:
    freeze(psutil.Process(pids(one)[0]))


@pytest.mark.parametrize(("end", "how"), [(0, _kill), (1, _freeze), long(1, _kill), long(0, _freeze)])
def test_a_child_that_dies_takes_the_group_along(
    end: int, how: Callable[[Link], None], world: World, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "LEAVE_SECONDS", 0.3)
    pair = joined(listener)
    exchange(*pair)
    before = pids(*pair)
    how(pair[end])
    for one in pair:
        reason_at(one)
    all_out(before)
    world.restart()  # what they left is not what this is about
    again = joined(listener)
    assert not set(pids(*again)) & set(before)
    exchange(*again)


@pytest.mark.parametrize("what", [What.DUPLICATE, long(What.FLIP), long(What.ZERO)])
def test_a_group_that_brought_something_wrong_is_left(what: What, world: World, listener: Listener) -> None:
    here, there = joined(listener)
    exchange(here, there)
    before = pids(here, there)
    world.plan(HERE, [Fault(what, at=100)])
    here.send(Frame(b"", (bytes(1000),)))
    if what is What.DUPLICATE:
        _quietly(lambda: here.send(Frame(b"", (bytes(1000),))))  # the reader may have noticed it already
    reason_after_all(there)
    reason_at(here)
    all_out(before)
    world.restart()  # what they left is not what this is about
    here, there = joined(listener)
    assert not set(pids(here, there)) & set(before)
    exchange(here, there)


@both_ends
def test_ends_that_disagree_on_what_was_sent_make_a_new_group(end: int, world: World, listener: Listener) -> None:
    pair = joined(listener)
    exchange(*pair)
    before = pids(*pair)
    pair[0].close()
    reason_at(pair[1])
    device = (HERE, THERE)[end]
    until(lambda: parked() == set(before), "both ends keep the group")
    (group,) = (group for group in kept_groups._kept if group.device == device)
    group.num_messages += 5000
    here, there = joined(listener)
    assert not set(pids(here, there)) & set(before)
    exchange(here, there)
    assert world.usage(HERE).num_left == world.usage(THERE).num_left == 0


@pytest.mark.parametrize("end", [0, long(1)], ids=["writer", "reader"])
def test_a_parked_child_that_cannot_go_on_is_replaced(
    end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the cost of what the other end leaves, which waits for it in a sum."""
    monkeypatch.setattr(handshake, "_RENEW_SECONDS", 0.5)
    monkeypatch.setattr(handshake, "LEAVE_SECONDS", 0.2)
    roomy = make_world(tmp_path, monkeypatch, limits=Limits(regions=1000))
    with transports.listen(roomy.address(), options=QUICK) as listener:
        pair = joined(listener)
        before = pids(*pair)
        pair[0].close()
        reason_at(pair[1])
        until(lambda: parked() == set(before), "both ends keep the group")
        freeze(psutil.Process(before[end]))
        again = joined(listener)
        assert not set(pids(*again)) & set(before)
        exchange(*again)


def test_a_parked_child_that_died_is_replaced(listener: Listener) -> None:
    here, there = joined(listener)
    before = pids(here, there)
    here.close()
    reason_at(there)
    until(lambda: parked() == set(before), "both ends keep the group")
    for pid in before:
        psutil.Process(pid).kill()
    here, there = joined(listener)
    assert not set(pids(here, there)) & set(before)
    exchange(here, there)


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


def test_the_old_child_is_gone_before_another_begins(world: World, listener: Listener) -> None:
    """A device has no room for a second group, so another listener gets its own only after the first one's end."""
    here, there = joined(listener)
    before = pids(here, there)
    with transports.listen(world.address(), options=QUICK) as other:
        here.abort()
        again = joined(other)
        assert not any(psutil.pid_exists(pid) for pid in before)
        exchange(*again)
        again[0].abort()
    assert world.usage(HERE).num_groups == 2


def test_another_process_waits_until_the_device_is_free(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys, transports
link = transports.connect(sys.argv[1], timeout=20)
print(link.recv(20).header.decode(), flush=True)
sys.stdin.read()
"""
    here, _ = joined(listener)
    monkeypatch.setattr(kept_groups, "keep_seconds", 0.0)
    with process(code, listener.address) as other:
        time.sleep(0.3)
        here.abort()
        listener.accept(SECONDS).send(Frame(b"welcome"))
        assert other.stdout is not None
        assert other.stdout.readline() == "welcome\n"


# -- who is killed in a receive ----------------------------------------------------------------------------------------


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


def test_a_program_that_ends_leaves_nobody_in_a_receive(world: World) -> None:
    with echo("connector", QUICK, world.address()) as (here, child):
        here.send(Frame(EXIT))
        child.wait(SECONDS)
        reason_after_all(here)
        all_out(pids(here))
    kept_groups.end_all()
    until(lambda: world.usage(HERE).num_alive + world.usage(THERE).num_alive == 0, "all children end")
    assert world.usage(THERE).num_left == 0


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


@pytest.mark.parametrize(
    ("systems", "reason"),
    [
        (("26.2", "26.4"), "the two Macs have macOS 26.2 and 26.4"),
        (("26.3", "26.2.1"), "the two Macs have macOS 26.2 and 26.3"),
        (("26.3", "26.1"), "needs macOS 26.2 or later, and this is 26.1"),
        (("15.5", "26.3"), "needs macOS 26.2 or later, and this is 15.5"),
    ],
)
def test_systems_that_do_not_fit_are_refused(
    systems: tuple[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, monkeypatch, macos=systems)
    with transports.listen(world.address(), options=QUICK) as listener:
        with pytest.raises(TransportUnavailable, match=reason):
            transports.connect(listener.address, timeout=SECONDS, options=QUICK)
        until(lambda: world.usage(HERE).num_groups + world.usage(THERE).num_groups == 0, "no group was made")


def test_both_before_26_3_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch, macos=("26.2", "26.2"))
    with transports.listen(world.address(), options=QUICK) as listener:
        exchange(*joined(listener))


def test_an_exhausted_device_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch, limits=Limits(max_groups=0))
    with (
        transports.listen(world.address(), options=QUICK) as listener,
        pytest.raises(TransportUnavailable, match=r"protection domain.*too many groups were made since the last start"),
    ):
        transports.connect(listener.address, timeout=SECONDS, options=QUICK)
