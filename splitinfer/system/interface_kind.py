"""Classifies network interfaces by the system's data about them. Pure.

    THUNDERBOLT   macOS: the ports "Thunderbolt Bridge", "Thunderbolt 1" ... of ``networksetup -listallhardwareports``;
                  Linux: the driver thunderbolt-net, which names them thunderbolt0 (kernel: admin-guide/thunderbolt)
    WIRELESS      macOS: the port "Wi-Fi"; Linux: /sys/class/net/NAME/wireless
    VPN, VIRTUAL  by their names, which are the same everywhere: tunnels, containers, virtual machines, AirDrop's awdl
    CABLE         everything else

"Thunderbolt Ethernet" is an adapter for a network cable, so it counts as one.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Network = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_TUNNELS = ("utun", "tun", "tap", "wg", "ipsec", "ppp", "tailscale", "zt", "gif", "stf")
_VIRTUAL = ("docker", "br-", "virbr", "veth", "vmnet", "vnic", "bridge1", "awdl", "llw", "ap", "anpi", "cni", "flannel")


class Kind(StrEnum):
    """The kind of network that an interface leads to."""

    THUNDERBOLT = "Thunderbolt"
    CABLE = "cable"
    WIRELESS = "Wi-Fi"
    VPN = "VPN"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class LocalInterface:
    """An interface that is up. ``networks``: its addresses with their networks. ``speed``: the driver's figure in Mb/s,
    or 0 if it gives none. ``index``: the system's number."""

    name: str
    kind: Kind
    networks: tuple[Network, ...]
    speed: int = 0
    index: int = 0

    @property
    def ipv4(self) -> tuple[str, ...]:
        """The interface's IPv4 addresses."""
        return tuple(str(each.ip) for each in self.networks if each.version == 4)

    @property
    def words(self) -> str:
        """The interface as a person names it.

        >>> LocalInterface("bridge0", Kind.THUNDERBOLT, ()).words
        'Thunderbolt (bridge0)'
        """
        return f"{self.kind.value} ({self.name})"


def kind_of(name: str, port: str = "", driver: str = "", *, is_wireless: bool = False) -> Kind:
    """Return the kind of an interface. ``port``: its hardware port on macOS. ``driver``: its driver on Linux."""
    if (port.startswith("Thunderbolt") and "Ethernet" not in port) or driver == "thunderbolt-net":
        return Kind.THUNDERBOLT
    if not port and name.startswith("thunderbolt"):
        return Kind.THUNDERBOLT
    if port == "Wi-Fi" or is_wireless:
        return Kind.WIRELESS
    if port:
        return Kind.CABLE
    if name.startswith(_TUNNELS):
        return Kind.VPN
    return Kind.VIRTUAL if name.startswith(_VIRTUAL) else Kind.CABLE


_TO_OTHERS = (Kind.WIRELESS, Kind.CABLE, Kind.VPN)


def address_for_others(interfaces: Iterable[LocalInterface]) -> str | None:
    """Return the IPv4 address at which a phone or another computer most likely reaches this machine.

    Self-assigned addresses, as on a cable between two Macs, do not count. Return None if there is no other.
    """
    found = [
        (_TO_OTHERS.index(each.kind), str(one.ip))
        for each in interfaces
        for one in each.networks
        if each.kind in _TO_OTHERS and one.version == 4 and not one.ip.is_link_local
    ]
    return min(found, default=(0, None))[1]


def interface_of(source: str, interfaces: Sequence[LocalInterface]) -> LocalInterface | None:
    """Return the interface that has this address, which may have a scope, or None if none of these has it."""
    number, _, scope = source.partition("%")
    if scope:
        return next((each for each in interfaces if scope in (each.name, str(each.index))), None)
    ip = ipaddress.ip_address(number)
    return next((each for each in interfaces if any(ip == network.ip for network in each.networks)), None)


def is_direct(own: str, interfaces: Sequence[LocalInterface]) -> bool:
    """Return whether packets that leave this machine from its address ``own`` stay on one cable: loopback, Thunderbolt,
    or a network cable with self-assigned addresses."""
    address, interface = ipaddress.ip_address(own), interface_of(own, interfaces)
    if address.is_loopback or interface is None:
        return address.is_loopback
    return interface.kind is Kind.THUNDERBOLT or (interface.kind is Kind.CABLE and address.is_link_local)
