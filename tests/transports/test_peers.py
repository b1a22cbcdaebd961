"""What only real processes can do wrong, and receivers that are smaller: for every scheme that crosses processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract import SECONDS, reason_at, until
from echoes import EXIT, echo

import transports
from transports import Frame, Link, LinkClosed, LinkOptions, acknowledged

ADDRESSES = {
    "tcp": "tcp://127.0.0.1:0",
    "curve+tcp": "curve+tcp://127.0.0.1:0",
    "rdma": "rdma://127.0.0.1:0?backend=ring",
    "curve+rdma": "curve+rdma://127.0.0.1:0?backend=ring",
}
SIDES = ("connector", "listener")
BRISK = LinkOptions(beat_every=0.1, dead_after=0.7, silent_after=2.5)


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


@by_default("tcp-listener", "rdma-connector")
def test_a_silent_peer_is_not_lost_while_its_machine_acknowledges(side: str, address: str) -> None:
    """First it wakes in time, also with a full window; then it does not."""
    with echo(side, BRISK, address) as (link, child):
        frames = 1 + 200 * ("rdma" not in address)
        for _ in range(2):
            child.send_signal(signal.SIGSTOP)
            for _ in range(frames):
                link.send(Frame(b"busy?", (bytes(100_000),)))
            until(lambda: link.is_busy, "its machine answers")
            time.sleep(0.8)
            child.send_signal(signal.SIGCONT)
            assert [link.recv(SECONDS).header for _ in range(frames)] == [b"busy?"] * frames
            assert not link.is_busy
        child.send_signal(signal.SIGSTOP)
        silence = _silence_at(link)
        child.send_signal(signal.SIGCONT)
        assert 2.5 <= silence < 10


@pytest.mark.parametrize("side", SIDES)
def test_a_machine_that_acknowledges_nothing_is_lost_sooner(side: str) -> None:
    """Its cable is out: no connection ends, and nothing arrives."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make a network namespace")
    name = f"si{os.getpid()}{side[0]}"
    with contextlib.ExitStack() as stack:
        try:
            _ip(f"netns add {name}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespace: {error.stderr}")
        stack.callback(_ip, f"netns del {name}")
        _ip(f"link add {name}a type veth peer name {name}b netns {name}")
        stack.callback(_ip, f"link del {name}a")
        _ip(f"addr add 10.213.77.1/30 dev {name}a")
        _ip(f"link set {name}a up")
        _ip(f"-n {name} addr add 10.213.77.2/30 dev {name}b")
        _ip(f"-n {name} link set {name}b up")
        inside = ("ip", "netns", "exec", name)
        address = f"tcp://10.213.77.{2 if side == 'connector' else 1}:0"
        with echo(side, LinkOptions(), address, inside) as (link, _):
            time.sleep(1)  # heartbeats
            _ip(f"-n {name} link set {name}b down")
            assert 3 <= _silence_at(link) < 10  # and not 15
            assert not link.is_busy


def _silence_at(link: Link) -> float:
    """Return the seconds of silence that a link says it ended for. They began before the test's last act: with the last
    heartbeat, which is late on a busy machine."""
    said = re.fullmatch(r"nothing received from \S+ for ([0-9.]+) s", reason_at(link))
    assert said is not None
    return float(said[1])


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("probes", "unacknowledged", "age", "answers"),
    [(0, 0, 9.0, True), (0, 4, 0.1, True), (0, 4, 2.7, False), (1, 0, 5.0, True), (2, 0, 2.7, False)],
    ids=["all acknowledged", "some lately", "none lately", "a probe of a full window", "unanswered probes"],
)
def test_what_linux_tells(probes: int, unacknowledged: int, age: float, answers: bool) -> None:
    told = bytearray(104)
    struct.pack_into("=B", told, 3, probes)
    struct.pack_into("=I", told, 24, unacknowledged)
    struct.pack_into("=I", told, 56, int(1000 * age))
    assert acknowledged._on_linux(bytes(told), 2.6) is answers
    assert acknowledged._on_linux(bytes(told[:40]), 2.6) is None, "an older kernel"


@pytest.mark.parametrize(("waiting", "window", "answers"), [(0, 9, True), (50, 9, False), (50, 0, True)])
def test_what_a_mac_tells(waiting: int, window: int, answers: bool) -> None:
    """By its header; it was not run there."""
    told = bytearray(116)
    struct.pack_into("=II", told, 28, window, waiting)
    assert acknowledged._on_macos(bytes(told)) is answers


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
