"""What kind of interface each is."""

import ipaddress
import socket
from typing import Any

import pytest

from splitinfer.system.interface_kind import Kind, LocalInterface, address_for_others, kind_of
from splitinfer.system.interfaces import local_interfaces, source_towards


@pytest.mark.parametrize(
    ("name", "seen", "kind"),
    [
        ("en0", {"port": "Ethernet"}, Kind.CABLE),  # on a Mac
        ("en1", {"port": "Wi-Fi"}, Kind.WIRELESS),
        ("bridge0", {"port": "Thunderbolt Bridge"}, Kind.THUNDERBOLT),
        ("en2", {"port": "Thunderbolt 1"}, Kind.THUNDERBOLT),
        ("en9", {"port": "Thunderbolt Ethernet Slot 1"}, Kind.CABLE),
        ("utun4", {}, Kind.VPN),
        ("awdl0", {}, Kind.VIRTUAL),
        ("thunderbolt0", {"driver": "thunderbolt-net"}, Kind.THUNDERBOLT),  # on Linux
        ("renamed", {"driver": "thunderbolt-net"}, Kind.THUNDERBOLT),
        ("wlp3s0", {"driver": "iwlwifi", "is_wireless": True}, Kind.WIRELESS),
        ("enp1s0", {"driver": "igc"}, Kind.CABLE),
        ("br0", {}, Kind.CABLE),
        ("docker0", {}, Kind.VIRTUAL),
        ("br-1f2e3d", {}, Kind.VIRTUAL),
        ("wg0", {}, Kind.VPN),
        ("tailscale0", {}, Kind.VPN),
    ],
)
def test_kinds(name: str, seen: dict[str, Any], kind: Kind):
    assert kind_of(name, **seen) is kind


def interface(name: str, kind: Kind, *addresses: str) -> LocalInterface:
    return LocalInterface(name, kind, tuple(map(ipaddress.ip_interface, addresses)))


@pytest.mark.parametrize(
    ("found", "address"),
    [
        ([("en0", Kind.CABLE, "10.0.0.7/24"), ("en1", Kind.WIRELESS, "fe80::1/64", "192.168.0.5/24")], "192.168.0.5"),
        ([("utun4", Kind.VPN, "100.64.0.1/10"), ("en5", Kind.CABLE, "169.254.9.1/16", "10.0.0.7/24")], "10.0.0.7"),
        ([("bridge0", Kind.THUNDERBOLT, "192.168.9.1/24"), ("docker0", Kind.VIRTUAL, "172.17.0.1/16")], None),
    ],
)
def test_the_address_that_a_phone_can_open(found: list[tuple[str, Kind, str]], address: str | None):
    assert address_for_others([interface(*each) for each in found]) == address


def test_this_machine_s_interfaces_have_addresses_and_are_no_loopback():
    known = {name for _, name in socket.if_nameindex()}
    for each in local_interfaces():
        assert each.name in known
        assert each.networks
        assert not all(network.ip.is_loopback for network in each.networks)


def test_the_way_to_an_address():
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert source_towards("255.255.255.255") is None
