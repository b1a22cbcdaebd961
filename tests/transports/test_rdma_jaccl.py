"""rdma:// over emulated JACCL: whatever its devices do, what is received is right, or the link ends with a reason."""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract import SECONDS, pair, reason_at
from echoes import echo
from interrupts import freeze
from jaccl import READER, WRITER, all_received, child_of, make_world, until_free
from processes import until

import transports
from tests.emulation.jaccl.world import Fault, What, World
from transports import Frame, Link, LinkClosed, LinkOptions, Listener, TransportUnavailable
from transports.rdma import child_process, link, probe, transport

BRISK = LinkOptions(beat_every=0.1, dead_after=1.0, silent_after=1.0)
SMALL, LARGE = 10_000, 3 << 20  # a generated token's hidden state, a prompt's


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def frame(index: int, size: int) -> Frame:
    return Frame(index.to_bytes(4, "little"), (random.Random(index).randbytes(size),))


def joined(listener: Listener) -> tuple[Link, Link]:
    here = transports.connect(listener.address, timeout=SECONDS, options=BRISK)
    return here, listener.accept(SECONDS)


@pytest.mark.parametrize(("size", "fault"), [(SMALL, Fault(What.FLIP, at=5000)), (LARGE, Fault(What.DROP, 1))])
def test_damage_ends_the_link_before_anything_wrong_is_received(size: int, fault: Fault, world: World) -> None:
    with pair(world.address(), BRISK) as (here, there):
        here.send(frame(0, size))
        assert there.recv(SECONDS) == frame(0, size)
        world.plan(WRITER, [fault])
        try:
            for index in range(1, 5):
                here.send(frame(index, size))
        except LinkClosed:
            pass
        received, reason = all_received(there)
        assert received == [frame(index, size) for index in range(1, 1 + len(received))]
        assert len(received) < 4
        assert any(words in reason for words in ("messages are", "checksum of a message", "out of step")), reason
        assert reason_at(here) == reason


def test_a_lost_message_that_nothing_follows_ends_the_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the end of the control link is handed over late, behind the last message of the group."""
    hand_over = link.RdmaLink._on_control

    def hand_over_late(self: link.RdmaLink, item: Frame | LinkClosed) -> None:
        if isinstance(item, LinkClosed) and not self._is_writer:
            time.sleep(0.3)
        hand_over(self, item)

    monkeypatch.setattr(link.RdmaLink, "_on_control", hand_over_late)
    with pair(world.address(), BRISK) as (here, there):
        world.plan(WRITER, [Fault(What.DROP)])
        here.send(frame(1, SMALL))
        assert "nothing arrived" in reason_at(there)
        assert "nothing arrived" in reason_at(here)


def test_a_reader_whose_writer_stands_still_is_killed_and_a_line_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer's machine is gone, as far as the reader can tell: nobody says that nothing follows."""
    monkeypatch.setattr(child_process.ChildProcess.end, "__defaults__", (0.2,))
    with transports.listen(world.address(), options=BRISK) as listener:
        with caplog.at_level(logging.WARNING, "transports"):
            here, there = joined(listener)
            here.send(frame(1, SMALL))
            assert there.recv(SECONDS) == frame(1, SMALL)
            freeze(child_of(here))
            there.abort()
            until_free(world)
            line = f"was killed inside an RDMA operation on {READER}"
            until(lambda: line in caplog.text, "the line is logged, once the process has ended")
        assert world.usage(READER).num_left == 1
        with pytest.raises(TransportUnavailable, match="Register memory region failed"):
            joined(listener)


def _unread(here: Link, there: Link) -> None:
    for index in range(50):
        here.send(frame(index, 100_000))
    there.close("enough")


def _within_a_frame(here: Link, there: Link) -> None:
    """The writer waits for room in the middle of a frame."""
    there.deliver_to(lambda _: time.sleep(0.05))
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(here.send, frame(1, 40 << 20))
        time.sleep(0.05)
        here.abort()
    assert sending.exception() is None or isinstance(sending.exception(), LinkClosed)


ENDINGS: dict[str, Callable[[Link, Link], None]] = {
    "the writer closes": lambda here, there: here.close("bye"),
    "the reader closes": lambda here, there: there.close("bye"),
    "the writer aborts": lambda here, there: here.abort(),
    "the reader aborts": lambda here, there: there.abort(),
    "at rest": lambda here, there: (time.sleep(0.5), there.close("bye"))[0],  # longer than REST_SECONDS
    "unread": _unread,
    "within a frame": _within_a_frame,
    "the control link is lost": lambda here, there: here._control.abort(),  # type: ignore[attr-defined]
}


def test_a_device_carries_one_link_after_the_other_however_they_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until the processes of the one before have ended, and none of them has to be killed in a receive."""
    monkeypatch.setitem(transport.REST_SECONDS, "jaccl", 0.25)
    with transports.listen(world.address(), options=BRISK) as listener:
        for ending, end in ENDINGS.items():
            here, there = joined(listener)
            for index, size in enumerate((SMALL, 300_000)):
                here.send(frame(index, size))
                assert there.recv(SECONDS) == frame(index, size)
                there.send(frame(index, size))
                assert here.recv(SECONDS) == frame(index, size)
            end(here, there)
            for one in (here, there):
                until(lambda one=one: one.closed is not None, ending)  # type: ignore[misc]
        until_free(world)
    for device in (WRITER, READER):
        assert world.usage(device).num_left == world.overlaps(device) == 0


def test_a_second_link_on_a_device_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_DEVICE_SECONDS", 0.05)
    with pair(world.address(), BRISK) as (here, there):
        here.send(frame(1, SMALL))
        assert there.recv(SECONDS) == frame(1, SMALL)
        with pytest.raises(TransportUnavailable, match=f"{WRITER} carries a link already"):
            transports.connect(here.address, timeout=SECONDS, options=BRISK)
        here.send(frame(2, SMALL))
        assert there.recv(SECONDS) == frame(2, SMALL)


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["connector", "listener"])
def test_an_engine_that_is_killed_leaves_nobody_in_a_receive(side: str, world: World) -> None:
    """However busy: its own child and the peer's come out of the group, since each end has somebody to say so."""
    with echo(side, BRISK, world.address()) as (here, child):
        for index in range(20):
            here.send(frame(index, 200_000))
        child.kill()
        all_received(here)
        until_free(world)
    assert world.usage(WRITER).num_left == world.usage(READER).num_left == 0


def test_a_pulled_cable_ends_the_link(world: World) -> None:
    with pair(world.address(), BRISK) as (here, there):
        world.plan(WRITER, [Fault(What.UNPLUG)])
        here.send(frame(1, SMALL))
        assert f"signal {signal.SIGSEGV.value}" in reason_at(here)
        assert "transport process" in reason_at(there)
    until_free(world)


def test_an_old_framing_is_refused_before_a_group_is_joined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = b'rdma {"backend": "jaccl", "device": "rdma_en1", "framing": 2}'
    monkeypatch.setattr(transport.LinkRequest, "opening", property(lambda _: opening))
    with (
        transports.listen(world.address(), options=BRISK) as listener,
        pytest.raises(TransportUnavailable, match="rdma framing version 2 there, version 3 here"),
    ):
        transports.connect(listener.address, timeout=SECONDS, options=BRISK)
    assert list((world.folder / READER).iterdir()) == []


def test_the_tools_show_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "world", num_cables=2, macos=("26.1", "26.3"))
    with pytest.raises(TransportUnavailable):  # no Mac, and not emulated
        probe.device_for("jaccl", "rdma_en1")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    assert probe.device_for("jaccl", "rdma_en1") == "rdma_en1"
    with pytest.raises(TransportUnavailable, match=r"needs macOS 26\.2 or later, and this is 26\.1"):
        probe.device_for("jaccl", "rdma_en0")
