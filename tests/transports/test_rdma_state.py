"""What rdma:// decides before a group is joined: versions that fit, devices that are free, what earlier kills left, and
what an error means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transports import TransportUnavailable
from transports.rdma import devices, leftovers, macos, symptoms

# -- versions of macOS -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("26.2", (26, 2)),
        ("26.3.1", (26, 3)),
        ("16.3", (26, 3)),  # what a program of an older SDK is told
        ("15.7", (15, 7)),
        ("Linux", None),
        ("٢٦.٢", None),
        ("9" * 40, None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert macos.parse(text) == version


@pytest.mark.parametrize(("here", "there"), [("26.2", "26.2.1"), ("26.3", "27.0"), ("16.4", "26.3")])
def test_ends_that_frame_alike_may_join(here: str, there: str) -> None:
    assert macos.why_not_together(here, there) is None
    assert macos.why_not_together(there, here) is None


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("26.2", "26.3", "macOS 26.2 and 26.3, and RDMA's frames have other sizes from 26.3 on"),
        ("26.1", "26.3", "needs macOS 26.2 or later, and one end is 26.1"),
        ("", "26.3", "and one end is another system"),
    ],
)
def test_ends_that_frame_differently_may_not(one: str, other: str, reason: str) -> None:
    assert reason in (macos.why_not_together(one, other) or "")
    swapped = macos.why_not_together(other, one) or ""
    assert reason.replace("one end", "the other end") in swapped.replace("one end", "the other end")


# -- what an error means -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ValueError: [jaccl] Changing queue pair to RTR failed with errno 22", "Thunderbolt bridge"),
        ("ValueError: [jaccl] Changing queue pair to RTR failed with errno 96", "after many groups"),
        ("ValueError: [jaccl] Changing queue pair to RTR failed with errno 60", "not on this cable"),
        (
            "[jaccl] Creating the queue pair failed with errno 16. Thunderbolt RDMA devices support a limited",
            "ten queue",
        ),
        ("RuntimeError: [jaccl] Couldn't allocate protection domain", "the port is down"),
        ("RuntimeError: [jaccl] Register memory region failed", "no memory regions left"),
        ("RuntimeError: [jaccl] Could not find device rdma_en9 (4 available)", "ibv_devices lists"),
        ("[jaccl] No IPv4-mapped GID for this device. Thunderbolt RDMA ports", "an IPv4 address"),
        ("RuntimeError: [jaccl] Recv failed with errno=2", "the other end failed first"),
        ("the transport process ended (signal 11)", "was the cable pulled"),
        ("the transport process ended (signal 14)", "different cables"),
        ("the two ends have not joined a group within 20 s", "different cables"),
        ("the RDMA devices cannot be listed: Command 'ibv_devinfo' timed out after 5.0 seconds", "the driver hangs"),
    ],
)
def test_an_error_is_followed_by_what_to_do(error: str, advice: str) -> None:
    explained = symptoms.explained(error)
    assert explained.startswith(error + ": ")
    assert advice in explained
    assert symptoms.explained(explained) == explained, "once is enough: the other end explains it, too"


# -- what was killed ---------------------------------------------------------------------------------------------------


def test_kills_are_counted_until_the_machine_starts_again(tmp_path: Path) -> None:
    where = tmp_path / "rdma"
    assert leftovers.read(where, "first") == ()
    assert leftovers.warning(()) == ""
    for pid in (11, 12):
        leftovers.record("rdma_en5", pid, where, "first")
    leftovers.record("rdma_en3", 13, where, "first")
    found = leftovers.read(where, "first")
    assert [(each.device, each.pid) for each in found] == [("rdma_en5", 11), ("rdma_en5", 12), ("rdma_en3", 13)]
    assert leftovers.read(where, "second") == ()
    leftovers.record("rdma_en5", 14, where, "second")
    assert [each.pid for each in leftovers.read(where, "second")] == [14]
    assert len(list(where.iterdir())) == 1, "earlier starts' are gone"


# -- who has a device --------------------------------------------------------------------------------------------------


def test_a_device_has_one_holder(tmp_path: Path) -> None:
    first = devices.claim("rdma_en5", tmp_path)
    with pytest.raises(TransportUnavailable, match="rdma_en5 carries a link of this process already, and a device has"):
        devices.claim("rdma_en5", tmp_path)
    devices.claim("rdma_en3", tmp_path).release()
    first.release()
    devices.claim("rdma_en5", tmp_path).release()


def test_a_claim_lasts_as_long_as_the_process_that_has_it(tmp_path: Path) -> None:
    """Across processes; and though the one that claimed it has given up its own share."""
    mine = devices.claim("rdma_en5", tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[mine.descriptor]
    ) as child:
        mine.release()
        with pytest.raises(TransportUnavailable, match=f"of this process|process {os.getpid()}"):
            devices.claim("rdma_en5", tmp_path)
        child.kill()
        child.wait()
        devices.claim("rdma_en5", tmp_path).release()
