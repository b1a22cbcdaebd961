"""What kind of interface each is."""

import socket

import pytest

from splitinfer.system.interface_kind import Kind, kind_of
from splitinfer.system.interfaces import hardware_ports, local_interfaces

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 02:00:00:00:00:04

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 02:00:00:00:00:05

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 02:00:00:00:00:01

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 02:00:00:00:00:01

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en9
Ethernet Address: 02:00:00:00:00:09
"""


def test_kinds_on_a_mac():
    ports = {device: port for port, device in hardware_ports(PORTS).items()}
    kinds = {
        name: kind_of(name, ports.get(name, "")) for name in ("en0", "en1", "bridge0", "en2", "en9", "utun4", "awdl0")
    }
    assert kinds == {
        "en0": Kind.CABLE,
        "en1": Kind.WIRELESS,
        "bridge0": Kind.THUNDERBOLT,
        "en2": Kind.THUNDERBOLT,
        "en9": Kind.CABLE,
        "utun4": Kind.VPN,
        "awdl0": Kind.VIRTUAL,
    }


@pytest.mark.parametrize(
    ("name", "driver", "is_wireless", "kind"),
    [
        ("thunderbolt0", "thunderbolt-net", False, Kind.THUNDERBOLT),
        ("renamed", "thunderbolt-net", False, Kind.THUNDERBOLT),
        ("wlp3s0", "iwlwifi", True, Kind.WIRELESS),
        ("enp1s0", "igc", False, Kind.CABLE),
        ("br0", "", False, Kind.CABLE),
        ("docker0", "", False, Kind.VIRTUAL),
        ("br-1f2e3d", "", False, Kind.VIRTUAL),
        ("wg0", "", False, Kind.VPN),
        ("tailscale0", "", False, Kind.VPN),
    ],
)
def test_kinds_on_linux(name: str, driver: str, is_wireless: bool, kind: Kind):
    assert kind_of(name, driver=driver, is_wireless=is_wireless) is kind


def test_this_machine_s_interfaces_have_addresses_and_are_no_loopback():
    known = {name for _, name in socket.if_nameindex()}
    for each in local_interfaces():
        assert each.name in known
        assert each.networks
        assert not all(network.ip.is_loopback for network in each.networks)
