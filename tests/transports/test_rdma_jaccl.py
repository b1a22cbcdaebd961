"""rdma:// over emulated JACCL: whatever its devices do, what is received is right, or the link ends with a reason."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from contract import SECONDS, pair, payload, reason_at
from jaccl import READER, WRITER, all_received, make_world, until_free

import transports
from tests.emulation.jaccl.world import Fault, What, World
from transports import Frame, Link, LinkClosed, LinkOptions, TransportUnavailable
from transports.rdma import link

BRISK = LinkOptions(beat_every=0.1, dead_after=1.0)
SMALL, LARGE = 10_000, 3 << 20  # a generated token's hidden state, a prompt's


def nightly(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def frame(index: int, size: int) -> Frame:
    return Frame(index.to_bytes(4, "little"), (random.Random(index).randbytes(size),))


def child_of(one: Link) -> psutil.Process:
    assert isinstance(one, link.RdmaLink)
    return psutil.Process(one.child_pid)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_frames_of_all_sizes_are_messages_of_one(world: World) -> None:
    sizes = [0, 1, SMALL, LARGE, 65_000, 66_000, SMALL, 1 << 20, 5]
    with pair(world.address(), BRISK) as (here, there):
        for index, size in enumerate(sizes):
            here.send(frame(index, size))
            assert there.recv(SECONDS) == frame(index, size)


# -- what arrives otherwise than it was sent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (SMALL, Fault(What.FLIP, at=5000)),
        (LARGE, Fault(What.DROP, 1)),
        nightly(LARGE, Fault(What.DUPLICATE, 1)),
        nightly(LARGE, Fault(What.FLIP, 3, at=60_000)),
        nightly(LARGE, Fault(What.ZERO, 1)),
        nightly(SMALL, Fault(What.FLIP, 2, at=4)),
        nightly(SMALL, Fault(What.DROP)),
        nightly(SMALL, Fault(What.DUPLICATE)),
        nightly(LARGE, Fault(What.DROP, 40)),
    ],
)
def test_damage_ends_the_link_before_anything_wrong_is_received(size: int, fault: Fault, world: World) -> None:
    """With the options that an engine uses: no checksum was asked for."""
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
        assert any(words in reason for words in ("messages are", "checksum of a message", "out of step", "version")), (
            reason
        )
        assert reason_at(here) == reason


@pytest.mark.parametrize("seconds", [nightly(0.0), 0.3])
def test_a_lost_message_that_nothing_follows_ends_the_link(
    seconds: float, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the end of the control link is handed over late, behind the last message of the group."""
    hand_over = link.RdmaLink._on_control

    def hand_over_late(self: link.RdmaLink, item: Frame | LinkClosed) -> None:
        if isinstance(item, LinkClosed) and not self._is_writer:
            time.sleep(seconds)
        hand_over(self, item)

    monkeypatch.setattr(link.RdmaLink, "_on_control", hand_over_late)
    with pair(world.address(), BRISK) as (here, there):
        world.plan(WRITER, [Fault(What.DROP)])
        here.send(frame(1, SMALL))
        assert "nothing arrived" in reason_at(there)
        assert "nothing arrived" in reason_at(here)


@pytest.mark.nightly
def test_damage_is_received_only_where_checksums_were_switched_off(world: World) -> None:
    options = LinkOptions(beat_every=0.1, dead_after=1.0, checksum_parts=False)
    with pair(world.address(), options) as (here, there):
        world.plan(WRITER, [Fault(What.FLIP, at=5000)])
        here.send(frame(1, SMALL))
        (got,) = payload(there.recv(SECONDS))
        (sent,) = payload(frame(1, SMALL))
        assert sum(one != other for one, other in zip(got, sent, strict=True)) == 1


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [nightly((0,)), (1,), nightly((0, 1))], ids=["writer", "reader", "both"])
def test_killed_children_end_the_link_at_both_ends(which: tuple[int, ...], world: World) -> None:
    with pair(world.address(), BRISK) as links:
        links[0].send(frame(1, SMALL))
        assert links[1].recv(SECONDS) == frame(1, SMALL)
        children = [child_of(one) for one in links]
        for end in which:
            children[end].kill()
        for one in links:
            assert "transport process" in reason_at(one)
    until_free(world)
    assert world.usage(WRITER).num_left == 0, "a writer is never within a receive"


def test_a_pulled_cable_ends_the_link(world: World) -> None:
    with pair(world.address(), BRISK) as (here, there):
        world.plan(WRITER, [Fault(What.UNPLUG)])
        here.send(frame(1, SMALL))
        assert f"signal {signal.SIGSEGV.value}" in reason_at(here)
        assert "transport process" in reason_at(there)
    until_free(world)


def test_an_old_framing_is_refused_before_a_group_is_joined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from transports.rdma import handshake

    opening = b'rdma {"backend": "jaccl", "device": "rdma_en1"}'
    monkeypatch.setattr(handshake.LinkRequest, "opening", property(lambda _: opening))
    with (
        transports.listen(world.address(), options=BRISK) as listener,
        pytest.raises(TransportUnavailable, match="rdma framing version 1 there, version 2 here"),
    ):
        transports.connect(listener.address, timeout=SECONDS, options=BRISK)
    assert world.usage(READER).num_groups == 0
