"""Finds the network interfaces of this machine that are up, with their kinds."""

import ipaddress
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitinfer.system.command import run
from splitinfer.system.interface_kind import LocalInterface, Network, kind_of

_PORTS_COMMAND = ("/usr/sbin/networksetup", "-listallhardwareports")
_SECONDS = 5.0
_CLASS = Path("/sys/class/net")
_IP = (socket.AF_INET, socket.AF_INET6)
_LINK_LOCAL_BITS = 64
_DISCARD = 9  # a port; nothing is sent to it


def local_interfaces() -> tuple[LocalInterface, ...]:
    """Return the interfaces that are up and have an address, without loopback."""
    states, ports, wireless = psutil.net_if_stats(), _ports(), _wireless_interfaces()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        networks = tuple(_networks((each.address, each.netmask) for each in addresses if each.family in _IP))
        if state is None or not state.isup or not networks or all(each.ip.is_loopback for each in networks):
            continue
        kind = kind_of(name, ports.get(name, ""), _driver(name), is_wireless=name in wireless)
        found.append(LocalInterface(name, kind, networks, max(0, state.speed), _index(name)))
    return tuple(found)


def source_towards(host: str) -> str | None:
    """Return the address from which packets to ``host`` leave, or None without a route. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as to_ask:
        try:
            to_ask.connect((host, _DISCARD))
        except OSError:
            return None
        return str(to_ask.getsockname()[0])


def own_addresses() -> frozenset[str]:
    """Return all IP addresses of this machine, without scopes."""
    return frozenset(each.address.partition("%")[0] for all_of in psutil.net_if_addrs().values() for each in all_of)


def _wireless_interfaces() -> frozenset[str]:
    """Return the interfaces that are Wi-Fi on Linux. On macOS, networksetup reports them instead."""
    return frozenset(path.parent.name for path in _CLASS.glob("*/wireless"))


def _networks(pairs: Iterable[tuple[str, str | None]]) -> Iterable[Network]:
    for address, mask in pairs:
        number = address.partition("%")[0]
        try:
            yield _network(ipaddress.ip_address(number), mask)
        except ValueError:
            continue


def _network(address: ipaddress.IPv4Address | ipaddress.IPv6Address, mask: str | None) -> Network:
    if address.version == 4:
        return ipaddress.IPv4Interface(f"{address}/{mask or 32}")
    bits = int(ipaddress.IPv6Address(mask)).bit_count() if mask else _LINK_LOCAL_BITS
    return ipaddress.IPv6Interface(f"{address}/{bits}")


def _ports() -> dict[str, str]:
    """Return the hardware port of each interface of a Mac. Empty on other systems, or if networksetup fails."""
    if sys.platform != "darwin":
        return {}
    return {device: port for port, device in hardware_ports(run(_PORTS_COMMAND, _SECONDS).output).items()}


def _driver(name: str) -> str:
    try:
        return (_CLASS / name / "device" / "driver").resolve(strict=True).name
    except OSError:
        return ""


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


# -- parsing the system's commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface; ``members`` are the interfaces of a bridge."""

    is_up: bool
    ipv4: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


def parse_ifconfig(text: str) -> dict[str, Interface]:
    """Return the interfaces that ``ifconfig`` lists, by name."""
    found: dict[str, Interface] = {}
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head = re.match(r"(\w+): flags=[0-9a-f]+<([^>\n]*)>", block)
        if head:
            ipv4 = re.findall(r"^\s+inet (\d+(?:\.\d+){3})\b", block, re.MULTILINE)
            members = re.findall(r"^\s+member: (\w+)\b", block, re.MULTILINE)
            found[head[1]] = Interface("UP" in head[2].split(","), tuple(ipv4), tuple(members))
    return found


def hardware_ports(text: str) -> dict[str, str]:
    """Return the interface of each port, from ``networksetup -listallhardwareports``."""
    return dict(re.findall(r"^Hardware Port: ([^\n]+?)[ \t]*\nDevice: (\w+)[ \t]*$", text, re.MULTILINE))
