"""Emulated links: the contract over a slow wire, delays that are what the profile says, faults that are all noticed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from contract import CHECKS, QUICK, SECONDS, number, numbered, pair, payload, reason_at, until

import transports
from transports import AddressError, Frame, Link, LinkClosed, LinkOptions, emulated, registry
from transports.emulated import PRESETS, EmulatedTransport, LinkProfile
from transports.framing import PRELUDE_BYTES, Kind, encode
from transports.inproc import InprocTransport
from transports.tcp import TcpTransport

CARRIERS = {"inproc": "inproc://emulated", "tcp": "tcp://127.0.0.1:0"}
SLOW = LinkProfile(latency=0.001, jitter=0.001, bytes_per_second=1e9)
PACKED = LinkProfile(latency=0.0005, drop=1e-15)  # travels in packets, and nothing ever happens to them
# When a port is free again is tcp's own affair, and checked there.
CARRIED_CHECKS = [
    (inner, check) for inner in CARRIERS for check in CHECKS if (inner, check) != ("tcp", "address_in_use")
]
INNER: dict[str, transports.Transport] = {"inproc": InprocTransport(), "tcp": TcpTransport()}


@contextlib.contextmanager
def scheme_of(inner: transports.Transport, profile: LinkProfile, scheme: str) -> Iterator[str]:
    """Both ends emulated, under a scheme that exists for the length of the test; gives an address to listen on."""
    registry._transports[scheme] = EmulatedTransport(inner, profile, scheme=scheme)
    try:
        yield CARRIERS[inner.scheme].replace(inner.scheme, scheme, 1)
    finally:
        del registry._transports[scheme]


@pytest.mark.parametrize(("carrier", "check"), CARRIED_CHECKS)
@pytest.mark.parametrize("profile", [SLOW, PACKED], ids=["slow", "packed"])
def test_contract_with_both_ends_emulated(carrier: str, profile: LinkProfile, check: str) -> None:
    with scheme_of(INNER[carrier], profile, "emulatedtest") as address:
        CHECKS[check](address)


@pytest.mark.parametrize(("carrier", "check"), CARRIED_CHECKS)
def test_contract_with_one_end_emulated_both_ways(carrier: str, check: str) -> None:
    with emulated.installed(SLOW):
        CHECKS[check](CARRIERS[carrier])


# -- delays ------------------------------------------------------------------------------------------------------------


def one_way(here: Link, there: Link, *, num_frames: int, num_bytes: int, gap: float = 0.0) -> list[float]:
    """Seconds from `send` to the sink of each frame."""
    return [there_at - here_at for here_at, there_at in passed(here, there, num_frames, num_bytes, gap)]


def passed(here: Link, there: Link, num_frames: int, num_bytes: int, gap: float = 0.0) -> list[tuple[float, float]]:
    """When each frame was sent, and when it came to the sink, in seconds."""
    arrived: list[float] = []
    sent: list[float] = []
    there.deliver_to(lambda item: arrived.append(time.monotonic()))
    data = bytes(num_bytes)
    for index in range(num_frames):
        sent.append(time.monotonic())
        here.send(Frame(index.to_bytes(4, "little"), (data,)))
        if gap:
            time.sleep(gap)
    until(lambda: len(arrived) == num_frames, "arrival")
    return list(zip(sent, arrived, strict=True))


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


@pytest.mark.parametrize("name", PRESETS)
def test_latency_is_the_profile_s(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = PRESETS[name]
    with scheme_of(INNER["inproc"], profile, "emulatedtest") as address, pair(address) as (here, there):
        delays = sorted(one_way(here, there, num_frames=200, num_bytes=0, gap=2 * profile.latency + profile.jitter))
    assert delays[0] >= profile.latency
    median, late = statistics.median(delays), delays[int(0.95 * len(delays))]
    expected = profile.latency + profile.jitter / 2
    assert median < expected + 0.01 + profile.jitter / 4  # a machine that is busy with other tests
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  {name}: one way {microseconds(expected)} us in the profile, median {microseconds(median)},"
            f" 95 % below {microseconds(late)}",
            end=" ",
        )


@pytest.mark.parametrize("name", PRESETS)
def test_bandwidth_is_the_profile_s(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = PRESETS[name]
    assert profile.bytes_per_second is not None
    num_bytes = int(profile.bytes_per_second / 100) - PRELUDE_BYTES - 4  # 10 ms each
    with scheme_of(INNER["inproc"], profile, "emulatedtest") as address, pair(address) as (here, there):
        times = passed(here, there, 20, num_bytes)
    took = times[-1][1] - times[0][0]  # sending them takes a while, too, on a busy machine
    assert 0.2 + profile.latency - 0.01 <= took < 0.3 + profile.latency + profile.jitter
    with capsys.disabled():
        print(f"\n  {name}: 200 ms of traffic took {took * 1e3:.1f} ms", end=" ")  # noqa: T201


@pytest.mark.parametrize("carrier", CARRIERS)
def test_round_trip_emulated_from_one_side(carrier: str, capsys: pytest.CaptureFixture[str]) -> None:
    def round_trip() -> float:
        with pair(CARRIERS[carrier]) as (here, there):
            there.deliver_to(lambda item: None if isinstance(item, LinkClosed) else there.send(item))
            times = []
            for _ in range(100):
                started = time.monotonic()
                here.send(Frame(b"step", (bytes(4096),)))
                here.recv(SECONDS)
                times.append(time.monotonic() - started)
            here.close()
        return statistics.median(times)

    bare = round_trip()
    profile = LinkProfile(latency=0.001)
    with emulated.installed(profile):
        slow = round_trip()
    assert 0.002 <= slow < bare + 0.002 + 0.002
    with capsys.disabled():
        extra = microseconds(slow - bare - 2 * profile.latency)
        print(  # noqa: T201
            f"\n  {carrier}: bare {microseconds(bare)} us, with 2 x 1000 us: {microseconds(slow)}, so {extra} too many",
            end=" ",
        )


def test_both_directions_have_a_wire_of_their_own() -> None:
    profile = LinkProfile(latency=0.05, bytes_per_second=1e6)
    with emulated.installed(profile), pair("inproc://duplex") as (here, there):
        started = time.monotonic()
        here.send(Frame(b"", (bytes(100_000),)))
        there.send(Frame(b"", (bytes(100_000),)))
        here.recv(SECONDS)
        there.recv(SECONDS)
        assert 0.15 <= time.monotonic() - started < 0.25


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


def test_what_is_left_to_add_to_a_carrier() -> None:
    carrier = LinkProfile(latency=50e-6, bytes_per_second=2e9)
    assert PRESETS["1gbe"].beyond(carrier).latency == pytest.approx(150e-6)
    assert PRESETS["10gbe"].beyond(carrier).bytes_per_second == pytest.approx(1 / (1 / 1.1e9 - 1 / 2e9))
    fast = PRESETS["thunderbolt-rdma"].beyond(carrier)
    assert (fast.latency, fast.bytes_per_second) == (0.0, None)


# -- faults ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "corrupt": "checksum|first bytes are wrong|transport version|cut short|at most",
    "duplicate": "repeated",
    "reorder": "missing",
    "drop": "missing",
}
NUM_FRAMES = 40


def received_until_the_end(link: Link) -> tuple[list[Frame], LinkClosed]:
    frames = []
    try:
        while True:
            frames.append(link.recv(SECONDS))
    except LinkClosed as ending:
        return frames, ending


def suffer(address: str, profile: LinkProfile, *, options: LinkOptions = QUICK, closes: bool) -> tuple[int, str]:
    """Send NUM_FRAMES over a bad link. How many came, which must be the first ones, unharmed; and how it ended."""
    sent = [Frame(index.to_bytes(4, "little"), (os.urandom(index), os.urandom(3))) for index in range(NUM_FRAMES)]
    with (
        scheme_of(INNER[address.partition(":")[0]], profile, "emulatedtest") as outer,
        pair(outer, options) as (here, there),
    ):
        with contextlib.suppress(LinkClosed):
            for frame in sent:
                here.send(frame)
        if closes:
            here.close("all done")
        frames, ending = received_until_the_end(there)
        if not closes:
            until(lambda: here.closed is not None, "the end at the sender")
        assert [frame.header for frame in frames] == [frame.header for frame in sent[: len(frames)]]
        assert [payload(frame) for frame in frames] == [payload(frame) for frame in sent[: len(frames)]]
        assert reason_at(there) == ending.reason
        return len(frames), ending.reason


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_noticed(fault: str) -> None:
    """50 seeds: exactly the frames before the mishap, then LinkClosed saying what it was; and the sender is told."""
    counts = []
    for seed in range(50):
        profile = LinkProfile(latency=50e-6, seed=seed, **{fault: 0.1})  # type: ignore[arg-type]
        num_frames, reason = suffer(CARRIERS["inproc"], profile, closes=seed % 2 == 0)
        if reason == "all done":
            assert num_frames == NUM_FRAMES  # nothing happened
        else:
            assert re.search(FAULTS[fault], reason), reason
            assert num_frames < NUM_FRAMES + (fault == "duplicate")
        counts.append(num_frames)
    assert len(set(counts)) > 5  # the seeds differ


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_over_tcp(fault: str) -> None:
    for seed in range(3):
        profile = LinkProfile(seed=seed, **{fault: 0.5})  # type: ignore[arg-type]
        num_frames, reason = suffer(CARRIERS["tcp"], profile, closes=False)
        assert num_frames < NUM_FRAMES
        assert "bad frame from" in reason


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("fault", ["drop", "reorder"])
def test_a_lost_tail_is_noticed(fault: str, closes: bool) -> None:
    """The last frame of a burst, after which the sender only waits, or closes."""
    profile = LinkProfile(**{fault: 1.0})  # type: ignore[arg-type]
    with scheme_of(INNER["inproc"], profile, "emulatedtest") as address, pair(address) as (here, there):
        here.send(Frame(b"the only one"))
        if closes:
            here.close("all done")
        assert "missing" in reason_at(there)


def test_the_same_seed_does_the_same() -> None:
    profile = LinkProfile(corrupt=0.03, drop=0.03, duplicate=0.03, reorder=0.03, seed=5)
    assert len({suffer(CARRIERS["inproc"], profile, closes=True)[0] for _ in range(5)}) == 1


def test_a_cut_comes_after_the_frames_before_it() -> None:
    for carrier, profile in itertools.product(CARRIERS, [LinkProfile(cut_after_frames=7), LinkProfile(cut=0.1)]):
        with emulated.installed(profile), pair(CARRIERS[carrier]) as (here, there):
            with contextlib.suppress(LinkClosed):
                for index in range(NUM_FRAMES):
                    here.send(numbered(index))
            frames, _ = received_until_the_end(there)
            assert [number(frame) for frame in frames] == list(range(len(frames)))
            assert "was cut after" in reason_at(here)
            if profile.cut_after_frames is not None and carrier == "inproc":  # tcp may lose what is under way
                assert len(frames) == 7


def test_without_payload_checksums_only_the_header_is_safe() -> None:
    options = LinkOptions(checksum_parts=False)
    outcomes = []
    for seed in range(40):
        profile = LinkProfile(corrupt=1.0, seed=seed)
        with scheme_of(INNER["inproc"], profile, "emulatedtest") as address, pair(address, options) as (here, there):
            here.send(Frame(b"header", (bytes(50),)))
            try:
                frame = there.recv(SECONDS)
            except LinkClosed:
                outcomes.append("noticed")
            else:
                outcomes.append("unharmed" if payload(frame) == [bytes(50)] else "harmed")
                assert frame.header == b"header"
    assert set(outcomes) == {"noticed", "harmed"}


def test_faults_need_both_ends() -> None:
    bad = LinkProfile(drop=0.1)
    with pytest.raises(ValueError, match="one side"):
        emulated.install(bad)
    with pair("inproc://plain") as (here, _), pytest.raises(ValueError, match="both ends"):
        emulated.emulate(here, bad)
    with transports.listen("inproc://plain") as listener:
        here = transports.connect("emulated+inproc://plain?drop=0.1", timeout=SECONDS)
        there = listener.accept(SECONDS)
        there.send(Frame(b"not a packet"))
        assert "bad frame" in reason_at(here)


def test_packets_of_the_wrong_kind_are_refused() -> None:
    with transports.listen("emulated+inproc://strict?drop=1e-9") as listener:
        here = transports.connect("inproc://strict", timeout=SECONDS)
        there = listener.accept(SECONDS)
        here.send(Frame(bytes(memoryview(encode(Kind.OPEN, seq=0)[0]))))
        assert "OPEN on an open link" in reason_at(there)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_close_flushes_what_is_on_the_wire(carrier: str) -> None:
    profile = LinkProfile(latency=0.2, jitter=0.05, bytes_per_second=1e6)
    with emulated.installed(profile), pair(CARRIERS[carrier]) as (here, there):
        for index in range(100):
            here.send(numbered(index))
        started = time.monotonic()
        here.close("all done")
        assert 0.2 <= time.monotonic() - started < 0.9
        assert [number(there.recv(SECONDS)) for _ in range(100)] == list(range(100))
        assert reason_at(there) == "all done"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_close_takes_a_second_at_most_and_does_not_lie(carrier: str) -> None:
    """What could not be flushed is dropped, and the peer does not take the rest for all."""
    with emulated.installed(LinkProfile(bytes_per_second=10_000)), pair(CARRIERS[carrier]) as (here, there):
        for index in range(50):
            here.send(Frame(index.to_bytes(4, "little"), (bytes(1000),)))  # 5 s in all
        started = time.monotonic()
        here.close("all done")
        assert time.monotonic() - started < 1.3
        frames, ending = received_until_the_end(there)
        assert [number(frame) for frame in frames] == list(range(len(frames)))
        assert 0 < len(frames) < 50
        assert "lost" in ending.reason
        assert reason_at(here) == "all done"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_abort_drops_what_is_on_the_wire(carrier: str) -> None:
    with emulated.installed(LinkProfile(latency=0.2)), pair(CARRIERS[carrier]) as (here, there):
        here.send(Frame(b"never arrives"))
        there.send(Frame(b"neither"))
        time.sleep(0.05)
        here.abort("had enough")
        assert received_until_the_end(here)[0] == received_until_the_end(there)[0] == []
        assert reason_at(here) == "had enough"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_peer_s_end_comes_after_its_delayed_frames(carrier: str) -> None:
    with emulated.installed(LinkProfile(latency=0.1)), pair(CARRIERS[carrier]) as (here, there):
        started = time.monotonic()
        there.send(Frame(b"last words"))
        there.close("bye")
        assert here.recv(SECONDS).header == b"last words"
        assert reason_at(here) == "bye"
        assert time.monotonic() - started >= 0.1


def test_a_sink_hears_of_an_abort_though_the_peer_s_end_is_under_way() -> None:
    with emulated.installed(LinkProfile(latency=0.3)), pair("inproc://ends") as (here, there):
        seen: list[Frame | LinkClosed] = []
        here.deliver_to(seen.append)
        there.close("bye")
        here.abort("had enough")
        until(lambda: len(seen) == 1, "the end")
        assert str(seen[0]) == "had enough"


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("ending", ["close", "abort", "peer closes", "listener closes"])
def test_nothing_is_left_behind(carrier: str, ending: str) -> None:
    me = psutil.Process()

    def one_round() -> None:
        with emulated.installed(SLOW), transports.listen(CARRIERS[carrier], options=QUICK) as listener:
            here = transports.connect(listener.address, timeout=SECONDS, options=QUICK)
            there = listener.accept(SECONDS)
            here.send(Frame(b"x", (bytes(100_000),)))
            there.recv(SECONDS)
            if ending == "close":
                here.close()
            elif ending == "abort":
                here.abort()
            elif ending == "peer closes":
                there.close()
        reason_at(here)

    one_round()  # starts zmq's own threads
    until(lambda: num_transport_threads() == 0, "threads end")
    num_files, num_threads = me.num_fds(), me.num_threads()
    for _ in range(10):
        one_round()
    until(lambda: num_transport_threads() == 0, "threads end")
    until(lambda: me.num_fds() <= num_files + 2, "descriptors are given back")
    until(lambda: me.num_threads() <= num_threads, "native threads end")


def num_transport_threads() -> int:
    return sum(thread.name.startswith("transports") for thread in threading.enumerate())


def test_an_idle_emulated_link_costs_nothing() -> None:
    with emulated.installed("1gbe"), pair("tcp://127.0.0.1:0", LinkOptions()):
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.1


# -- addresses and profiles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_by_address_on_both_sides(carrier: str) -> None:
    with transports.listen(f"emulated+{CARRIERS[carrier]}?link=wifi&jitter=0&seed=3") as listener:
        assert listener.address.startswith(f"emulated+{carrier}://")
        assert listener.address.endswith("?link=wifi&jitter=0&seed=3")
        here = transports.connect(listener.address, timeout=SECONDS)
        there = listener.accept(SECONDS)
        started = time.monotonic()
        here.send(Frame(b"ping"))
        there.send(there.recv(SECONDS))
        here.recv(SECONDS)
        assert 0.006 <= time.monotonic() - started < 0.05
        here.close()


def test_by_address_with_a_plain_listener() -> None:
    with transports.listen("tcp://127.0.0.1:0") as listener:
        address = f"emulated+{listener.address}?latency=0.02&both_ways=1"
        with transports.connect(address, timeout=SECONDS) as here:
            there = listener.accept(SECONDS)
            started = time.monotonic()
            here.send(Frame(b"ping"))
            there.send(there.recv(SECONDS))
            here.recv(SECONDS)
            assert 0.04 <= time.monotonic() - started < 0.1


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("?link=modem", "no link preset 'modem'; known: thunderbolt-rdma"),
        ("?speed=3", "unknown 'speed'; known: link, both_ways, latency"),
        ("?latency=soon", "soon"),
        ("?latency=-1", "latency must be"),
        ("?seed=1.5", "1.5"),
        ("?wifi", "wifi"),
    ],
)
def test_bad_queries(query: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem):
        transports.listen(f"emulated+inproc://x{query}")


def test_unknown_schemes_stay_unknown() -> None:
    for address in ("emulated+pigeon://roof", "slow+tcp://127.0.0.1:0", "emulated+emulated+inproc://x"):
        with pytest.raises(AddressError, match="no transport for"):
            transports.listen(address)


def test_install_and_uninstall() -> None:
    def latency() -> float:
        with pair("inproc://install") as (here, there):
            started = time.monotonic()
            here.send(Frame(b"ping"))
            there.recv(SECONDS)
            return time.monotonic() - started

    emulated.install(LinkProfile(latency=0.05))
    try:
        assert latency() >= 0.05
        with emulated.installed("thunderbolt-rdma"):
            assert latency() < 0.05
        assert latency() >= 0.05
    finally:
        emulated.install(None)
    assert latency() < 0.05


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


@pytest.mark.parametrize(
    "bad",
    [
        {"latency": -1},
        {"latency": float("nan")},
        {"jitter": float("inf")},
        {"bytes_per_second": 0},
        {"cut_after_frames": -1},
        {"drop": 1.5},
        {"cut": -0.1},
    ],
)
def test_bad_profiles(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LinkProfile(**bad)  # type: ignore[arg-type]
