"""Every scheme keeps the same contract: each check for each of them nightly, and by default those in which it differs.

inproc and tcp have all of it by default. Links with keys differ from tcp in how they begin, rdma in how frames come and
links end, over JACCL's stand-in also in sizes; emulated links in what is under way when something happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import curve  # noqa: F401 - one more scheme
import pytest
from contract import CHECKS
from jaccl import READER, WRITER, make_world, until_free

import transports
from tests.emulation import links as emulated
from tests.emulation.jaccl.device import Limits
from tests.emulation.links import LinkProfile

ADDRESSES = {
    "inproc": "inproc://contract",
    "tcp": "tcp://127.0.0.1:0",
    "curve": "curve+tcp://127.0.0.1:0",
    "rdma": "rdma://127.0.0.1:0?backend=ring",
    "emulated+inproc": "emulated+inproc://contract?latency=0.001&jitter=0.001&bytes_per_second=1e9",
    "emulated+tcp": "emulated+tcp://127.0.0.1:0?latency=0.001&jitter=0.001&bytes_per_second=1e9",
}
ONE_END = {"one end of inproc": "inproc", "one end of tcp": "tcp"}  # is emulated, in both directions
DIFFERS = {
    "curve": ("many_clients", "late_listener", "connect_timeout", "address_in_use"),
    "rdma": (
        *("late_receiver", "close_comes_after_frames", "abort", "thousands_in_both_directions_at_once", "bounds"),
        *("a_reader_that_stops", "nothing_is_left_over"),
    ),
    "jaccl": ("sizes_and_arrays", "unread_frames_are_bounded"),
    "emulated+inproc": ("close_comes_after_frames",),
    "emulated+tcp": ("progress",),
    "one end of inproc": ("unread_frames_are_bounded",),
    "one end of tcp": ("thousands_in_both_directions_at_once",),
}
# A cable carries one link; and when a port is free again is tcp's own affair, and checked there.
NOT_OF = {("jaccl", "many_clients"), ("emulated+tcp", "address_in_use"), ("one end of tcp", "address_in_use")}


def cases() -> Iterator[object]:
    for scheme in (*ADDRESSES, *ONE_END, "jaccl"):
        for check in CHECKS:
            if (scheme, check) not in NOT_OF:
                is_usual = check in DIFFERS.get(scheme, CHECKS)
                yield pytest.param(scheme, check, marks=() if is_usual else pytest.mark.nightly, id=f"{scheme}-{check}")


@contextmanager
def address_of(scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if scheme in ONE_END:
        with emulated.installed(LinkProfile(latency=0.001, jitter=0.001, bytes_per_second=1e9)):
            yield ADDRESSES[ONE_END[scheme]]
    elif scheme == "jaccl":
        # The next link does not wait for the end of the one before, so there are regions for both.
        world = make_world(folder, monkeypatch, limits=Limits(regions=10_000, queue_pairs=100))
        yield world.address()
        assert world.overlaps(WRITER) == world.overlaps(READER) == 0
        until_free(world)
    else:
        yield ADDRESSES[scheme]


@pytest.mark.parametrize(("scheme", "check"), cases())
def test_contract(scheme: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with address_of(scheme, tmp_path, monkeypatch) as address:
        CHECKS[check](address)


def test_all_schemes_are_checked() -> None:
    assert set(transports.known()) < set(ADDRESSES)


def test_unknown_scheme_lists_the_known() -> None:
    known = ", ".join(f"{scheme}://" for scheme in transports.known())
    with pytest.raises(transports.AddressError, match=f"carrier-pigeon://.*{known}"):
        transports.connect("carrier-pigeon://roof:1", timeout=1)


@pytest.mark.parametrize(
    "address", ["", "tcp", "tcp://", "tcp://host", "tcp://:1", "tcp://h:x", "tcp://h:65536", "tcp://::1:5"]
)
def test_bad_address(address: str) -> None:
    with pytest.raises(transports.AddressError):
        transports.listen(address)
