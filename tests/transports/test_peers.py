"""What only real processes can do wrong, and receivers that are smaller: for every scheme that crosses processes."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract import SECONDS, reason_at
from echoes import EXIT, echo

import transports
from transports import Frame, LinkClosed, LinkOptions

ADDRESSES = {
    "tcp": "tcp://127.0.0.1:0",
    "curve+tcp": "curve+tcp://127.0.0.1:0",
    "rdma": "rdma://127.0.0.1:0?backend=ring",
    "curve+rdma": "curve+rdma://127.0.0.1:0?backend=ring",
}
SIDES = ("connector", "listener")
BRISK = LinkOptions(beat_every=0.1, dead_after=1.0)


def by_default(*usual: str) -> pytest.MarkDecorator:
    """Each scheme with each side that we can be; those that are not usual run nightly."""
    cases = {f"{scheme}-{side}": (ADDRESSES[scheme], side) for scheme in ADDRESSES for side in SIDES}
    marks = {name: () if name in usual else pytest.mark.nightly for name in cases}
    return pytest.mark.parametrize(
        ("address", "side"), [pytest.param(*case, id=name, marks=marks[name]) for name, case in cases.items()]
    )


@by_default("tcp-connector", "rdma-listener")
def test_a_killed_peer_is_noticed_at_once(side: str, address: str) -> None:
    with echo(side, LinkOptions(), address) as (link, child):
        child.send_signal(signal.SIGKILL)
        assert "lost" in reason_at(link)  # and not silent, which takes seconds to show


@by_default("tcp-listener", "rdma-connector")
def test_a_peer_that_exits_is_noticed_at_once(side: str, address: str) -> None:
    with echo(side, LinkOptions(), address) as (link, child):
        link.send(Frame(EXIT))
        assert "lost" in reason_at(link)
        assert child.wait(SECONDS) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


@by_default("tcp-listener")
def test_a_frozen_peer_is_noticed_by_its_silence(side: str, address: str) -> None:
    with echo(side, BRISK, address) as (link, child):
        started = time.monotonic()
        child.send_signal(signal.SIGSTOP)
        reason = reason_at(link)
        took = time.monotonic() - started
        child.send_signal(signal.SIGCONT)
        assert reason.startswith("nothing received from ")
        assert took > 0.7


@by_default("tcp-connector")
def test_a_full_queue_waits_and_then_ends_the_link(side: str, address: str) -> None:
    with echo(side, BRISK, address) as (link, child):
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(LinkClosed):
            _send_for_ever(link, [])
        child.send_signal(signal.SIGCONT)


@by_default("tcp-listener", "rdma-connector")
def test_abort_frees_a_sender_that_waits(side: str, address: str) -> None:
    with echo(side, LinkOptions(), address) as (link, child):
        child.send_signal(signal.SIGSTOP)
        sent: list[Frame] = []
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(_send_for_ever, link, sent)
            _wait_until_stuck(sent)
            link.abort("changed our mind")
        assert str(sending.exception()) == "changed our mind"
        child.send_signal(signal.SIGCONT)


def _send_for_ever(link: transports.Link, sent: list[Frame]) -> None:
    frame = Frame(b"", (bytes(200_000),))
    while True:
        link.send(frame)
        sent.append(frame)


def _wait_until_stuck(sent: list[Frame]) -> None:
    """Until nothing more is taken."""
    seen = -1
    while seen != len(sent):
        seen = len(sent)
        time.sleep(0.1)


@by_default("tcp-connector")
def test_a_frame_over_the_receivers_bounds_ends_the_link(side: str, address: str) -> None:
    small, large = LinkOptions(max_part_bytes=1 << 20), LinkOptions()
    here, there = (large, small) if side == "connector" else (small, large)
    with transports.listen(address, options=there) as listener:
        connector = transports.connect(listener.address, timeout=SECONDS, options=here)
        accepted = listener.accept(SECONDS)
        sender, receiver = (connector, accepted) if side == "connector" else (accepted, connector)
        sender.send(Frame(b"fits"))
        with contextlib.suppress(LinkClosed):  # the receiver may have ended the link before all was taken
            sender.send(Frame(b"", (bytes(2 << 20),)))
        assert receiver.recv(SECONDS).header == b"fits"
        reason_at(receiver)
        reason_at(sender)
