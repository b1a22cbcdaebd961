"""Announces a worker, from the worker's own process.

zeroconf answers on a thread of its own, but does not notice addresses that come and go, as when a Thunderbolt cable is
plugged in: the worker's main thread does. It looks up the kinds of interfaces only after a change of addresses, because
on macOS that starts a program.

The announced host name, ``splitinfer-ID.local``, belongs to this program: addresses under the machine's own name would
conflict with the system's responder, which would then rename the machine.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import psutil

from splitinfer.discovery.announcement import SERVICE, Announcement, to_properties
from splitinfer.system.interface_kind import Kind, LocalInterface
from splitinfer.system.interfaces import local_interfaces

if TYPE_CHECKING:
    import zeroconf

log = logging.getLogger(__name__)

_LOOK, _RETRY = 5.0, 30.0  # seconds
_ANNOUNCED = (Kind.THUNDERBOLT, Kind.CABLE, Kind.WIRELESS)
_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


def addresses_of(host: str, interfaces: Sequence[LocalInterface]) -> tuple[str, ...]:
    """Return the addresses at which other machines reach a worker that listens on ``host``. Addresses of containers,
    virtual machines and VPNs count only if it listens on one of them."""
    ips = [str(each.ip) for one in interfaces if one.kind in _ANNOUNCED for each in one.networks]
    if host == _ANY_IPV4:
        return tuple(ip for ip in ips if ":" not in ip)
    if host == _ANY_IPV6:
        return tuple(ips)
    return (host,)


def registered(info: "zeroconf.ServiceInfo", addresses: Sequence[str]) -> "zeroconf.Zeroconf":
    """Return a responder that announces ``info`` on the interfaces with these addresses. Closing it says goodbye."""
    import zeroconf

    ipv4 = [each for each in addresses if ":" not in each]
    responder = zeroconf.Zeroconf(interfaces=ipv4 or zeroconf.InterfaceChoice.All)
    try:
        # The label is unique already: asking the network first would take most of a second on every link.
        responder.register_service(info, cooperating_responders=True)
    except BaseException:
        responder.close()
        raise
    return responder


def service_info(announcement: Announcement, addresses: Sequence[str]) -> "zeroconf.ServiceInfo":
    """Return the records of a worker. Raises OSError if one of the addresses is not valid."""
    import zeroconf

    families = [(each.partition("%")[0], socket.AF_INET6 if ":" in each else socket.AF_INET) for each in addresses]
    return zeroconf.ServiceInfo(
        f"{SERVICE}.local.",
        f"{announcement.label}.{SERVICE}.local.",
        port=announcement.port,
        properties=to_properties(announcement),
        server=f"splitinfer-{announcement.id}.local.",
        addresses=[socket.inet_pton(family, number) for number, family in families],
    )


def _numbers() -> Hashable:
    """Return all addresses of this machine, and the interfaces that are up, to compare them later."""
    up = frozenset(name for name, state in psutil.net_if_stats().items() if state.isup)
    return up, frozenset((name, each.address) for name, all_of in psutil.net_if_addrs().items() for each in all_of)


class Announcing:
    """Keeps the announcement of a worker that listens on ``host`` up to date. A failure here is logged and never stops
    the worker. Only one thread may call the methods."""

    def __init__(self, announcement: Announcement, host: str) -> None:
        self._announcement, self._host = announcement, host
        self._responder: zeroconf.Zeroconf | None = None
        self._addresses: tuple[str, ...] = ()
        self._seen: Hashable = None
        self._look_due = time.monotonic()
        self._said = ""

    def tick(self) -> None:
        """Update the announcement after a change. Call it about once a second. A failure is logged once and retried
        later."""
        if time.monotonic() < self._look_due:
            return
        import zeroconf

        self._look_due = time.monotonic() + _LOOK
        try:
            self._bring_up_to_date()
        except (OSError, RuntimeError, zeroconf.Error) as error:  # RuntimeError: it could use none of the interfaces
            self.close()
            self._look_due = time.monotonic() + _RETRY
            if str(error) != self._said:
                self._said = str(error)
                log.warning("mDNS announcing stopped: %s; use the address instead", error)

    def _bring_up_to_date(self) -> None:
        numbers = _numbers()
        if numbers == self._seen:
            return
        addresses = addresses_of(self._host, local_interfaces())
        if addresses != self._addresses:
            self.close()
            if addresses:
                self._responder = registered(service_info(self._announcement, addresses), addresses)
                self._addresses, self._said = addresses, ""
        self._seen = numbers

    def close(self) -> None:
        """Withdraw the announcement."""
        if self._responder is not None:
            import zeroconf

            with contextlib.suppress(OSError, RuntimeError, zeroconf.Error):
                self._responder.close()
        self._responder, self._addresses, self._seen = None, (), None
