"""What kind of interface each is."""

import socket

import pytest

from splitinfer.system.interface_kind import Kind, kind_of
from splitinfer.system.interfaces import local_interfaces


@pytest.mark.parametrize(
    ("name", "port", "kind"),
    [
        ("en0", "Ethernet", Kind.CABLE),
        ("en1", "Wi-Fi", Kind.WIRELESS),
        ("bridge0", "Thunderbolt Bridge", Kind.THUNDERBOLT),
        ("en2", "Thunderbolt 1", Kind.THUNDERBOLT),
        ("en9", "Thunderbolt Ethernet Slot 1", Kind.CABLE),
        ("utun4", "", Kind.VPN),
        ("awdl0", "", Kind.VIRTUAL),
    ],
)
def test_kinds_on_a_mac(name: str, port: str, kind: Kind):
    assert kind_of(name, port) is kind


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
