"""Emulated links: delays are what the profile says, ends follow the frames. ``test_contract.py`` has them, too."""

from __future__ import annotations

import itertools
import statistics
import time

import psutil
import pytest
from contract import SECONDS, num_threads_of_links, number, numbered, pair, reason_at, until

import transports
from tests.emulation import links as emulated
from tests.emulation.links import PRESETS, LinkProfile
from tests.emulation.links.wire import Timing
from transports import AddressError, Frame, Link, LinkClosed, LinkOptions

CARRIERS = {"inproc": "inproc://emulated", "tcp": "tcp://127.0.0.1:0"}
SLOW = LinkProfile(latency=0.001, jitter=0.001, bytes_per_second=1e9)
both_carriers = pytest.mark.parametrize("carrier", ["inproc", pytest.param("tcp", marks=pytest.mark.nightly)])


def received_until_the_end(link: Link) -> tuple[list[Frame], LinkClosed]:
    frames = []
    try:
        while True:
            frames.append(link.recv(SECONDS))
    except LinkClosed as ending:
        return frames, ending


# -- delays ------------------------------------------------------------------------------------------------------------
# When a frame is due is arithmetic. A real wire is held to one thing: no frame is early. How late one is depends on
# what else the machine does.


@pytest.mark.parametrize("name", sorted(PRESETS)[:2])
def test_frames_arrive_after_latency_and_jitter(name: str) -> None:
    profile = PRESETS[name]
    timing, gap = Timing(profile), 2 * profile.latency + profile.jitter
    delays = [timing.arrival(at, 0) - at for at in (index * gap for index in range(200))]
    assert min(delays) >= profile.latency - 1e-9
    assert max(delays) <= profile.latency + profile.jitter + 1e-9
    assert statistics.median(delays) == pytest.approx(
        profile.latency + profile.jitter / 2, abs=profile.jitter / 4 + 1e-9
    )


@pytest.mark.parametrize("name", sorted(PRESETS)[:2])
def test_frames_queue_behind_each_other(name: str) -> None:
    profile = PRESETS[name]
    assert profile.bytes_per_second is not None
    timing = Timing(profile)
    last = [timing.arrival(0.0, int(profile.bytes_per_second / 100)) for _ in range(20)][-1]  # 10 ms each
    assert 0.2 + profile.latency - 1e-3 <= last <= 0.2 + profile.latency + profile.jitter + 1e-3


def test_a_wire_that_was_idle_owes_nothing() -> None:
    timing = Timing(LinkProfile(latency=0.05, bytes_per_second=1e6))
    assert timing.arrival(0.0, 100_000) == pytest.approx(0.15)
    assert timing.arrival(0.2, 100_000) == pytest.approx(0.35)
    assert timing.arrival(0.2, 100_000) == pytest.approx(0.45)


@both_carriers
def test_no_frame_is_early_from_one_side(carrier: str) -> None:
    with emulated.installed(LinkProfile(latency=0.001)), pair(CARRIERS[carrier]) as (here, there):
        there.deliver_to(lambda item: None if isinstance(item, LinkClosed) else there.send(item))
        for _ in range(20):
            started = time.monotonic()
            here.send(Frame(b"step", (bytes(4096),)))
            here.recv(SECONDS)
            assert time.monotonic() - started >= 0.002
        here.close()


def test_jitter_keeps_the_order() -> None:
    profile = LinkProfile(latency=0.001, jitter=0.01, seed=7)
    with emulated.installed(profile), pair("inproc://jitter") as (here, there):
        arrived: list[tuple[float, int]] = []
        here.deliver_to(
            lambda item: None if isinstance(item, LinkClosed) else arrived.append((time.monotonic(), number(item)))
        )
        for index in range(100):
            there.send(numbered(index))
            here.send(numbered(index))
            time.sleep(0.001)
        assert [number(there.recv(SECONDS)) for _ in range(100)] == list(range(100))
        until(lambda: len(arrived) == 100, "arrival")
        assert [index for _, index in arrived] == list(range(100))
        gaps = [after - before for (before, _), (after, _) in itertools.pairwise(arrived)]
        assert max(gaps) > 0.002  # held up


def test_send_waits_for_a_slow_wire() -> None:
    """However long: a wire that moves is not dead."""
    options = LinkOptions(beat_every=0.02, dead_after=0.1)
    with emulated.installed(LinkProfile(bytes_per_second=100_000)), pair("inproc://slow", options) as (here, there):
        here.send(Frame(b"", (bytes(40_000),)))  # 0.4 s
        for index in range(600):
            here.send(numbered(index))
        assert len(there.recv(SECONDS).parts) == 1
        assert [number(there.recv(SECONDS)) for _ in range(600)] == list(range(600))


# -- ends --------------------------------------------------------------------------------------------------------------


@both_carriers
def test_close_flushes_what_is_on_the_wire(carrier: str) -> None:
    profile = LinkProfile(latency=0.2, jitter=0.05, bytes_per_second=1e6)
    with emulated.installed(profile), pair(CARRIERS[carrier]) as (here, there):
        for index in range(100):
            here.send(numbered(index))
        started = time.monotonic()
        here.close("all done")
        assert time.monotonic() - started >= 0.2
        assert [number(there.recv(SECONDS)) for _ in range(100)] == list(range(100))
        assert reason_at(there) == "all done"


@both_carriers
def test_abort_drops_what_is_on_the_wire(carrier: str) -> None:
    with emulated.installed(LinkProfile(latency=0.2)), pair(CARRIERS[carrier]) as (here, there):
        here.send(Frame(b"never arrives"))
        there.send(Frame(b"neither"))
        time.sleep(0.05)
        here.abort("had enough")
        assert received_until_the_end(here)[0] == received_until_the_end(there)[0] == []
        assert reason_at(here) == "had enough"


@both_carriers
def test_the_peer_s_end_comes_after_its_delayed_frames(carrier: str) -> None:
    with emulated.installed(LinkProfile(latency=0.1)), pair(CARRIERS[carrier]) as (here, there):
        started = time.monotonic()
        there.send(Frame(b"last words"))
        there.close("bye")
        assert here.recv(SECONDS).header == b"last words"
        assert reason_at(here) == "bye"
        assert time.monotonic() - started >= 0.1


@pytest.mark.parametrize("carrier", CARRIERS)
def test_nothing_is_left_behind(carrier: str) -> None:
    me = psutil.Process()

    def one_round() -> None:
        with emulated.installed(SLOW), pair(CARRIERS[carrier]) as (here, there):
            here.send(Frame(b"x", (bytes(100_000),)))
            there.recv(SECONDS)
            there.close()
            reason_at(here)
        until(lambda: num_threads_of_links() == 0, "threads end")

    one_round()  # starts zmq's own threads
    num_files, num_threads = me.num_fds(), me.num_threads()
    for _ in range(10):
        one_round()
    until(lambda: me.num_fds() <= num_files + 2, "descriptors are given back")
    until(lambda: me.num_threads() <= num_threads, "native threads end")


# -- addresses and profiles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("?link=modem", "no link preset 'modem'; known: thunderbolt-rdma"),
        ("?speed=3", "unknown 'speed'; known: link, both_ways, latency"),
        ("?latency=soon", "soon"),
        ("?latency=-1", "latency must be"),
    ],
)
def test_bad_queries(query: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem):
        transports.listen(f"emulated+inproc://x{query}")


def test_unknown_schemes_stay_unknown() -> None:
    for address in ("emulated+pigeon://roof", "slow+tcp://127.0.0.1:0", "emulated+emulated+inproc://x"):
        with pytest.raises(AddressError, match="no transport for"):
            transports.listen(address)


def test_an_address_makes_the_same_link_elsewhere() -> None:
    assert transports.address_for_others("inproc://elsewhere") == "inproc://elsewhere"
    with emulated.installed(LinkProfile(latency=0.05, bytes_per_second=1e16)):
        address = transports.address_for_others("inproc://elsewhere")
        assert transports.address_for_others(address) == address
    with transports.listen("inproc://elsewhere") as listener:
        there = transports.connect(address, timeout=SECONDS)
        here = listener.accept(SECONDS)
        for sender, receiver in ((here, there), (there, here)):
            started = time.monotonic()
            sender.send(Frame(b"ping"))
            receiver.recv(SECONDS)
            assert time.monotonic() - started >= 0.05
        there.close()
