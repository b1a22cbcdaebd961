"""What only rdma:// can do wrong: processes that carry frames and die, freeze or are left over; groups that stand
still; one port for two kinds of links. All over MLX's ring, since JACCL runs on Macs only."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
from contract import QUICK, SECONDS, pair, raw_dealer, reason_at
from curve import secured
from echoes import process
from jaccl import WRITER, carriers_of, child_of, make_world
from processes import are_gone, until

import transports
from transports import Frame, LinkOptions, TransportUnavailable
from transports.framing import FrameKind, encode
from transports.rdma import link, transport

RING = "rdma://127.0.0.1:0?backend=ring"
TCP = "tcp://127.0.0.1:0"
BRISK = LinkOptions(beat_every=0.1, dead_after=1.0, silent_after=1.0)


def all_gone(processes: list[psutil.Process]) -> None:
    until(lambda: are_gone(processes), "the processes end")


@pytest.mark.parametrize(("scheme", "end"), [("ring", 0), ("jaccl", 1)])
def test_a_killed_child_ends_the_link_at_both_ends(
    scheme: str, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, monkeypatch) if scheme == "jaccl" else None
    with pair(world.address() if world else RING) as links:
        links[0].send(Frame(b"hello"))
        assert links[1].recv(SECONDS) == Frame(b"hello")
        children = [child_of(one) for one in links]
        children[end].kill()
        reasons = [reason_at(one) for one in links]
        assert all("transport process" in reason and "signal 9" in reason for reason in reasons), reasons
        all_gone(children)
    assert world is None or world.usage(WRITER).num_left == 0, "a writer is never within a receive"


@pytest.mark.nightly
def test_a_child_that_joins_in_vain_goes_though_its_parent_is_gone() -> None:
    """MLX keeps the GIL while it waits for a peer, so nothing of Python can end the process then."""
    code = """
import struct, time
from transports.rdma.child_process import ChildProcess
from transports.rdma.channel import ChannelWord, Job
carrier = ChildProcess(Job(0, "ring", 1, 5, 0.1, host="127.0.0.1"))
while (own := carrier.channel.recv()).word is not ChannelWord.GATHER:
    pass
nobody = struct.pack("<4sH", bytes([127, 0, 0, 1]), 9)
carrier.channel.send(ChannelWord.GATHERED, text=own.text + nobody)
time.sleep(0.3)
print(carrier.pid, flush=True)
time.sleep(60)
"""
    with process(code) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(SECONDS)
        assert not are_gone([orphan]), "it waits for a peer"
        all_gone([orphan])


def test_a_group_through_which_nothing_comes_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a pulled cable: JACCL takes what is sent, and the control link goes another way."""
    monkeypatch.setattr(link.RdmaLink, "_on_chunk", lambda *_: None)
    with pair(RING, BRISK) as (here, there):
        here.send(Frame(b"into the void"))
        assert "nothing arrived" in reason_at(here)
        assert "nothing arrived" in reason_at(there)


def test_plain_links_come_by_the_same_port() -> None:
    with transports.listen(RING, options=QUICK) as listener:
        plain = listener.address.partition("?")[0].replace("rdma", "tcp")
        first = transports.connect(plain, timeout=SECONDS, options=QUICK)
        first_there = listener.accept(SECONDS)
        second = transports.connect(listener.address, timeout=SECONDS, options=QUICK)
        second_there = listener.accept(SECONDS)
        assert not isinstance(first_there, link.RdmaLink)
        assert isinstance(second_there, link.RdmaLink)
        for here, there in ((first, first_there), (second, second_there)):
            there.send(Frame(b"welcome"))  # the accepting side may speak first
            assert here.recv(SECONDS).header == b"welcome"


def test_a_tcp_listener_takes_plain_links_only() -> None:
    with transports.listen(TCP, options=QUICK) as listener:
        address = listener.address.replace("tcp", "rdma") + "?backend=ring"
        with pytest.raises(TransportUnavailable, match="this listener accepts only plain links"):
            transports.connect(address, timeout=SECONDS, options=QUICK)
        transports.connect(listener.address, timeout=SECONDS, options=QUICK)
        listener.accept(SECONDS)


@pytest.mark.parametrize(
    "opening",
    [
        b"rdma {}",
        b'rdma {"framing": 3}',
        b"rdma " + b"[" * 100,
        b'rdma {"backend": "mpi", "device": "", "nonce": 1, "framing": 3}',
        b'rdma {"backend": "ring", "device": "../etc", "nonce": 1, "framing": 3}',
        b'rdma {"backend": "ring", "device": "", "nonce": -1, "framing": 3}',
        b"x" * 1_000_000,
    ],
    ids=["empty", "framing", "deep", "backend", "device", "nonce", "long"],
)
def test_an_opening_that_makes_no_sense_gets_one_sentence(opening: bytes) -> None:
    before = set(carriers_of(os.getpid()))  # earlier tests' are about to end
    with transports.listen(RING, options=QUICK) as listener, raw_dealer(listener.address) as dealer:
        dealer.send_multipart(encode(FrameKind.OPEN, seq=0, header=opening))
        assert b"unknown kind of link" in dealer.recv_multipart()[0]
        assert set(carriers_of(os.getpid())) <= before
        with pytest.raises(transports.LinkTimeout):
            listener.accept(0.05)


def test_a_peer_that_goes_silent_or_talks_nonsense_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    wish, usual = transport.LinkRequest("ring", "", 1).opening, transport.HANDSHAKE_SECONDS
    with transports.listen(RING, options=QUICK) as listener:
        for words, reasons in (
            ([], (b"nothing", b"have not joined a group")),  # the second if the child has not started by the deadline
            ([b"[" * 5000], (b"did not send gather",)),
            ([b"gather of three"], (b"gathered 8 bytes, not 6",)),
        ):
            monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", usual if words else 1.0)  # a child takes time to start
            with raw_dealer(listener.address) as dealer:
                dealer.send_multipart(encode(FrameKind.OPEN, seq=0, header=wish))
                for seq, word in enumerate(words):
                    dealer.send_multipart(encode(FrameKind.DATA, seq=seq, header=word))
                heard = b""
                while not any(reason in heard for reason in reasons):
                    heard = b"".join(dealer.recv_multipart())
        until(lambda: carriers_of(os.getpid()) == [], "the children end")
        with pytest.raises(transports.LinkTimeout):
            listener.accept(0.05)


def test_a_join_that_fails_in_any_way_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    with transports.listen(RING, options=QUICK) as listener:
        monkeypatch.setattr(listener, "_room", threading.Semaphore(1))
        with monkeypatch.context() as patch:
            patch.setattr(transport.RdmaListener, "_join", fail)
            with pytest.raises(TransportUnavailable):
                transports.connect(listener.address, timeout=SECONDS, options=QUICK)
        until(lambda: listener._room._value == 1, "the place is free")  # type: ignore[attr-defined]


def test_the_refusing_ends_reason_is_what_the_other_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(_backend: str, wanted: str) -> str:
        if wanted == "there":
            raise TransportUnavailable("the cable is not in")
        return ""

    monkeypatch.setattr(transport, "device_for", no_device)
    with transports.listen(RING, options=QUICK) as listener:
        with pytest.raises(TransportUnavailable, match=r"^the cable is not in$"):
            transports.connect(f"{listener.address}&device=here:there", timeout=SECONDS, options=QUICK)
        with pytest.raises(transports.LinkTimeout):
            listener.accept(0.05)


@pytest.mark.nightly
def test_a_child_that_cannot_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.rdma.child_process.sys.executable", "/bin/false")
    with (
        transports.listen(RING, options=QUICK) as listener,
        pytest.raises(TransportUnavailable, match=r"transport process ended .*exit code 1"),
    ):
        transports.connect(listener.address, timeout=SECONDS, options=QUICK)


def test_a_ring_between_machines_carries_no_frames_of_a_link_with_keys() -> None:
    options = secured(QUICK)
    with pytest.raises(TransportUnavailable, match="ring does not encrypt"):
        transports.connect("rdma://192.0.2.1:5577?backend=ring", timeout=1, options=options)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("rdma://127.0.0.1:1?backend=mpi", "unknown backend 'mpi'; known: jaccl, ring"),
        ("rdma://127.0.0.1:1?lane=2", "unknown 'lane'; known: backend, device"),
        ("rdma://127.0.0.1:1?device=a:b:c", "is not a device"),
        ("rdma://127.0.0.1:1?backend", "bad query field"),
        ("rdma://127.0.0.1", "needs a host and a port"),
    ],
)
def test_addresses_that_are_none(address: str, reason: str) -> None:
    with pytest.raises(transports.AddressError, match=reason):
        transports.connect(address, timeout=1)
