"""Says why another machine cannot be reached, and what to do, from the error of a connection.

The same error number has different causes on different systems. The most misleading one is EHOSTUNREACH, "No route to
host": on macOS local network privacy causes it (``system.origin``). macOS then denies connections to other machines of
the network, but not to its router, before a packet is sent, while ping and Apple's own tools work (TN3179). A machine
that is off causes EHOSTDOWN there (*assumed*). On Linux EHOSTUNREACH means that a machine does not answer ARP, or that
a firewall rejects by ICMP. Private and link-local addresses and names under ``.local`` count as local.
"""

import errno
import ipaddress
import os
import platform

from splitinfer.system.origin import ProcessOrigin, Start, this_process
from transports import Unreachable

_SETTINGS = "System Settings → Privacy & Security → Local Network"
_FREE = "Terminal, ssh and daemons in /Library/LaunchDaemons need no permission"


def explain_here(unreachable: Unreachable, here: str = "this machine") -> str:
    """Return why this process cannot reach a machine, and what to do, without a full stop. ``here``: the reader's name
    for the machine that this process runs on."""
    return explain(unreachable, platform.system(), this_process(), here)


def explain(unreachable: Unreachable, system: str, origin: ProcessOrigin, here: str = "this machine") -> str:
    """Return why a process of ``origin`` on ``system`` ("Darwin", "Linux" ...) cannot reach a machine, with a
    remedy."""
    host, is_mac = unreachable.host, system == "Darwin"
    if unreachable.is_name:
        return _name(host, is_mac, origin, here)
    if unreachable.is_silent:
        return (
            f"{host} accepts connections, but no worker answers; the worker may be stopped or still starting, or "
            "another program may listen on that port"
        )
    match unreachable.error:
        case errno.EHOSTUNREACH if is_mac and is_local(host) and not origin.may_use_local_network:
            return _no_permission(host, origin, here)
        case errno.EHOSTUNREACH:
            return _no_route(host, is_mac, here)
        case errno.ECONNREFUSED:
            return f"the machine at {host} answers, but nothing listens on that port"
        case errno.ETIMEDOUT | errno.EHOSTDOWN:
            return _silent(host, is_firewall_possible=unreachable.error == errno.ETIMEDOUT)
        case errno.ENETUNREACH | errno.ENETDOWN:
            text = f"{here} has no network to {host} ({os.strerror(unreachable.error)})"
            return f"{text}; check its cable or Wi-Fi, and the route: {_route(host, is_mac)}"
        case errno.EACCES | errno.EPERM:
            text = f"a rule on {here} forbids connections to {host} ({os.strerror(unreachable.error)})"
            return f"{text}; check its firewall and its routes"
        case errno.EADDRNOTAVAIL | errno.EINVAL if _lacks_zone(host):
            return f"{host} is a link-local address and needs an interface; write it with the interface: [{host}%en5]"
    return str(unreachable)


def is_local(host: str) -> bool:
    """Return whether a host is likely to be in this machine's own network.

    >>> [is_local(host) for host in ("192.168.1.7", "169.254.3.4", "fe80::1%en5", "mini.local", "127.0.0.1", "1.1.1.1")]
    [True, True, True, True, False, False]
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.removesuffix(".").lower().endswith(".local")
    return (address.is_private or address.is_link_local) and not address.is_loopback


def _no_permission(host: str, origin: ProcessOrigin, here: str) -> str:
    text = (
        f"macOS on {here} blocks this process from reaching {host} (“No route to host”), most likely because it has no "
        "permission for the local network"
    )
    who = {
        Start.AGENT: f"{origin.name}, which launchd started as an agent (its entry may be named after Python)",
        Start.PROGRAM: origin.name,
    }.get(origin.start, "the program that started it")
    remedy = f"allow {who} in {_SETTINGS} there, then start it again; {_FREE}"
    if origin.start is Start.DETACHED:
        remedy = "its Terminal has been closed, and with it that right: start it from one that stays open, or over ssh"
    return f"{text}; {remedy}. If `ping -c 3 {host}` there gets no answer either, that machine is not in the network"


def _no_route(host: str, is_mac: bool, here: str) -> str:
    ways = f"`ping -c 3 {host}`, {_route(host, is_mac)}"
    if not is_local(host):
        return f"there is no route from {here} to {host}; check the route: {ways}"
    why = "the machine is off, asleep or in another network"
    if not is_mac:
        why += ", or a firewall rejects connections"
    elif host.startswith("169.254."):
        # macOS has one route for all these addresses, on its first interface: swellweb/targetBridge PR 130.
        why += ", or macOS looks for this self-assigned address elsewhere than on the cable"
        ways += ", and give both ends of the cable addresses of their own"
    return f"{here} finds no route to {host} (“No route to host”): {why}; check the route: {ways}"


def _silent(host: str, *, is_firewall_possible: bool) -> str:
    why = "the machine is off, asleep or in another network"
    if is_firewall_possible:
        why += ", or a firewall drops connections"
    remedy = f"wake it and try `ping -c 3 {host}`"
    if is_firewall_possible:
        remedy += "; run `splitinfer doctor` there: it checks a Mac's firewall"
    return f"nothing comes back from {host}: {why}; {remedy}"


def _name(host: str, is_mac: bool, origin: ProcessOrigin, here: str) -> str:
    text = f"{here} cannot resolve the name {host}"
    if not is_local(host):
        return f"{text}; check its spelling, or use the machine's IP address"
    if not is_mac:
        return f"{text}; names under .local need mDNS (Avahi with nss-mdns), or use the machine's IP address"
    remedy = "check that the machine is on and in this network (its name: System Settings → General → Sharing)"
    if not origin.may_use_local_network:
        remedy += f", and that this process may look for it ({_SETTINGS}); {_FREE}"
    return f"{text}; {remedy}"


def _route(host: str, is_mac: bool) -> str:
    return f"`route -n get {host}`" if is_mac else f"`ip route get {host}`"


def _lacks_zone(host: str) -> bool:
    """Return whether a host is a link-local IPv6 address without the interface that a connection needs."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.version == 6 and address.is_link_local and "%" not in host
