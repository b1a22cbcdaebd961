"""Emulated links: delays are what the profile says, ends follow the frames. ``test_contract.py`` has them, too."""

from __future__ import annotations

import statistics
import time

import pytest
from contract import SECONDS

import transports
from tests.emulation import links as emulated
from tests.emulation.links import LinkProfile
from tests.emulation.links.wire import Timing
from transports import AddressError, Frame

# -- delays ------------------------------------------------------------------------------------------------------------
# When a frame is due is arithmetic. A real wire is held to one thing: no frame is early. How late one is depends on
# what else the machine does.


def test_frames_arrive_after_latency_and_jitter() -> None:
    profile = LinkProfile(latency=3e-3, jitter=5e-3, bytes_per_second=50e6)
    timing, gap = Timing(profile), 2 * profile.latency + profile.jitter
    delays = [timing.arrival(at, 0) - at for at in (index * gap for index in range(200))]
    assert min(delays) >= profile.latency - 1e-9
    assert max(delays) <= profile.latency + profile.jitter + 1e-9
    assert statistics.median(delays) == pytest.approx(
        profile.latency + profile.jitter / 2, abs=profile.jitter / 4 + 1e-9
    )


# -- addresses and profiles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("?speed=3", "unknown 'speed'; known: both_ways, latency"),
        ("?latency=soon", "soon"),
        ("?latency=-1", "latency must be"),
    ],
)
def test_bad_queries(query: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem):
        transports.listen(f"emulated+inproc://x{query}")


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
