"""Browsing and announcing by the system's commands, for which scripts stand in that print what was recorded."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from announcing import MINI, announced

from splitinfer.discovery.by_commands import Avahi, DnsSd
from splitinfer.discovery.means import MeansFailed
from splitinfer.discovery.workers import Sighting

RECORDED = Path(__file__).parent / "recorded"
PATIENCE = 60.0


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a command of the system that runs a script of the shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def browse(means: Avahi | DnsSd, num_wanted: int) -> list[Sighting]:
    found: list[Sighting] = []
    end = time.monotonic() + PATIENCE
    means.browse((), found.append, lambda: len(found) >= num_wanted or time.monotonic() > end)
    return found


def test_avahi_browses(command: Callable[[str, str], None]):
    command("avahi-browse", f"cat {RECORDED / 'avahi_browse.txt'}")
    assert [each.addresses for each in browse(Avahi(), 2)] == [("fe80::105f:83ff:fe1f:be2c",), ("10.9.0.2",)]


def test_avahi_without_its_daemon(command: Callable[[str, str], None]):
    command("avahi-browse", "echo 'Failed to create client object: Daemon not running' >&2; exit 1")
    with pytest.raises(MeansFailed, match="avahi-browse failed: Failed to create client object: Daemon not running"):
        browse(Avahi(), 1)


def test_dns_sd_lists_without_end_and_the_system_knows_addresses(
    command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
):
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("arts-mini-2.local", 5577)
        return [
            (0, 0, 0, "", ("10.0.0.2", port)),
            (0, 0, 0, "", ("10.0.0.2", port)),
            (0, 0, 0, "", ("fe80::2%en0", port)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    command("dns-sd", f'[ "$*" = "-Z _splitinfer._tcp local" ] && cat {RECORDED / "dns_sd_zone.txt"} && exec sleep 600')
    assert [each.addresses for each in browse(DnsSd(), 1)] == [("10.0.0.2", "fe80::2%en0")]


def test_dns_sd_that_ends_has_failed(command: Callable[[str, str], None]):
    command("dns-sd", "echo 'DNSService call failed -65563'")
    with pytest.raises(MeansFailed, match="dns-sd failed: DNSService call failed -65563"):
        browse(DnsSd(), 1)


@pytest.mark.parametrize(
    ("means", "name", "first"),
    [
        (
            Avahi(),
            "avahi-publish",
            "--service mini 001122 _splitinfer._tcp 5577 txtvers=1 id=00112233445566ff name=mini",
        ),
        (DnsSd(), "dns-sd", "-R mini 001122 _splitinfer._tcp local 5577 txtvers=1 id=00112233445566ff name=mini"),
    ],
)
def test_a_command_announces_as_long_as_it_runs(
    command: Callable[[str, str], None], tmp_path: Path, means: Avahi | DnsSd, name: str, first: str
):
    log = tmp_path / "log"
    log.touch()
    command(name, f'echo "$*" >> {log}; exec sleep 600')
    registration = means.announce(MINI, ())
    until(lambda: len(log.read_text().splitlines()) == 1)
    registration.check()
    registration.update(announced(free=5 * 10**9))
    until(lambda: "free=5000" in log.read_text())
    registration.close()
    lines = log.read_text().splitlines()
    assert lines[0].startswith(first)
    assert lines[0].endswith("mem=48000 free=41000")


def test_a_command_that_ends_is_seen(command: Callable[[str, str], None]):
    command("avahi-publish", "echo 'Failed to add service: Not permitted' >&2; exit 1")
    registration = Avahi().announce(MINI, ())

    def has_failed() -> bool:
        with contextlib.suppress(MeansFailed):
            registration.check()
            return False
        return True

    until(has_failed)
    with pytest.raises(MeansFailed, match="what announces it has ended: Failed to add service: Not permitted"):
        registration.check()
    registration.close()


def test_what_zeroconf_is_given():
    pytest.importorskip("zeroconf")
    from splitinfer.discovery.announcement import from_strings
    from splitinfer.discovery.by_zeroconf import service_info
    from splitinfer.discovery.txt import strings_of

    info = service_info(MINI, ("10.77.0.2", "fe80::2"))
    assert info.name == "mini 001122._splitinfer._tcp.local."
    assert info.server == "splitinfer-00112233445566ff.local."
    assert info.parsed_addresses() == ["10.77.0.2", "fe80::2"]
    assert from_strings(strings_of(info.text), info.port) == MINI
