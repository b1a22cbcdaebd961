"""Emulated links: delays are what the profile says, ends follow the frames. ``test_contract.py`` has them, too."""

from __future__ import annotations

import statistics

import pytest

import transports
from tests.emulation.links import PRESETS
from tests.emulation.links.wire import Timing
from transports import AddressError

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
