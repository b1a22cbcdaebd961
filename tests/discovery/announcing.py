"""Workers and interfaces for the tests of discovery."""

import ipaddress
from dataclasses import replace
from typing import Any

from splitinfer.discovery.announcement import Announcement, fingerprint_of
from splitinfer.discovery.workers import KnownWorker, Route
from splitinfer.system.interface_kind import Kind, LocalInterface
from splitinfer.wire.messages import Versions

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
OTHER = fingerprint_of(OTHER_KEY)
VERSIONS = Versions(11, "0.1.0", "0.32.2", "0.32.2")
MINI = Announcement(
    name="mini",
    id="00112233445566ff",
    port=5577,
    fingerprint=fingerprint_of(KEY),
    versions=VERSIONS,
    device="Apple M4 Pro",
    memory=48 * 10**9,
)


def interface(name: str, kind: Kind, *addresses: str, speed: int = 0, index: int = 0) -> LocalInterface:
    """An interface; addresses with their networks, as ``10.0.0.1/24``."""
    return LocalInterface(name, kind, tuple(ipaddress.ip_interface(each) for each in addresses), speed, index)


CABLE = interface("bridge0", Kind.THUNDERBOLT, "10.77.0.1/24", "fe80::1/64", index=4)
ETHERNET = interface("en0", Kind.CABLE, "192.168.7.1/24", speed=1000, index=5)
WIFI = interface("en1", Kind.WIRELESS, "192.168.8.1/24", speed=866, index=6)
VPN = interface("utun3", Kind.VPN, "100.64.0.1/10")


def announced(**changes: Any) -> Announcement:
    return replace(MINI, **changes)


def worker(*addresses: str, **changes: Any) -> KnownWorker:
    return KnownWorker(announced(**changes), addresses)


def way(address: str, by: LocalInterface | None, milliseconds: float | None, problem: str = "") -> Route:
    return Route(address, by, None if milliseconds is None else milliseconds / 1e3, problem)
