"""By which interface each worker is reached, and Thunderbolt bridges that confuse the routes.

A cable between two Macs is of use only if the worker's address in the layout is one on the cable. A ``.local`` name may
have addresses on both, and which of them a connection takes is macOS's choice.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import product

from splitinfer.doctor.findings.finding import Finding, Seen, Severity, Way
from splitinfer.doctor.parsing.thunderbolt import thunderbolt_ports
from splitinfer.system import network

AREA = "network"
_BRIDGE = "Thunderbolt Bridge"
_NO_ROUTE = ("not in table", "has not been found", "RTNETLINK answers")  # words of route on macOS, and of ip on Linux
_ON_THE_CABLE = (
    "put the other Mac's address on the cable into the layout: there, `ipconfig getifaddr bridge0` prints it"
)
_SET_ADDRESS = (
    f'sudo networksetup -setmanual "{_BRIDGE}" 10.77.0.1 255.255.255.0 here, the same with 10.77.0.2 on the other Mac, '
    "and these addresses in the layout"
)


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on the ways to the workers of a layout, and on this machine's bridge."""
    ports = seen.read("hardware_ports", network.hardware_ports) or {}
    for way in seen.ways:
        yield from _way(seen, way, ports)
    yield from _shared_network(seen, ports)


def _way(seen: Seen, way: Way, ports: Mapping[str, str]) -> Iterator[Finding]:
    name = f"{way.worker} ({way.host})"
    interface = None if way.route.text is None else network.route_interface(way.route.text)
    if interface is None:
        if any(words in f"{way.route.text} {way.route.why}" for words in _NO_ROUTE):
            text = f"there is no route to {name}"
            yield Finding(AREA, Severity.PROBLEM, text, "connect both machines to one network")
        return
    port = next((port for port, device in ports.items() if device == interface), "")
    if port == "Wi-Fi" or interface in seen.wireless:
        yield _wireless(seen, name, interface)
    elif interface.startswith("utun"):
        text = f"the link to {name} goes through a VPN ({interface})"
        yield Finding(AREA, Severity.WARNING, text, "use an address of the local network in the layout")
    if seen.is_mac and _is_self_assigned(way.address) and not port.startswith("Thunderbolt"):
        # macOS keeps one route for all of 169.254.0.0/16, by its first interface: swellweb/targetBridge PR 130.
        text = f"{name} has a self-assigned address, which macOS looks for on {interface} and not on the cable"
        yield Finding(AREA, Severity.PROBLEM, text, _SET_ADDRESS)


def _wireless(seen: Seen, name: str, interface: str) -> Finding:
    cabled = [port.mac for port in seen.read("thunderbolt", thunderbolt_ports) or () if port.mac]
    if cabled:
        text = f"the link to {name} goes over Wi-Fi ({interface}), while a Thunderbolt cable leads to {cabled[0]}"
        return Finding(AREA, Severity.WARNING, text, _ON_THE_CABLE)
    text = f"the link to {name} goes over Wi-Fi ({interface}): each token waits for it, 5 ms and more"
    return Finding(AREA, Severity.NOTE, text, "connect the machines by a Thunderbolt or Ethernet cable")


def _is_self_assigned(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return found.version == 4 and found.is_link_local


def _shared_network(seen: Seen, ports: Mapping[str, str]) -> Iterator[Finding]:
    """A bridge that got an address of the house's network: macOS may then send everything over the cable (dnet #66)."""
    found = seen.read("interfaces", network.networks) or {}
    bridge = ports.get(_BRIDGE, "bridge0")
    others = [(name, net) for name, nets in found.items() if name != bridge for net in nets]
    for ours, (name, theirs) in product(found.get(bridge, ()), others):
        if ours.network.overlaps(theirs.network) and not ours.ip.is_loopback:
            text = f"{bridge} ({ours.ip}) and {name} ({theirs.ip}) are in one network, so macOS may take the wrong way"
            yield Finding(AREA, Severity.WARNING, text, _SET_ADDRESS)
            return
