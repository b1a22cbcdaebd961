"""Announces a worker, from the worker's own process.

zeroconf answers on a thread of its own, but does not see addresses that come and go, as when a Thunderbolt cable is
plugged in: the worker's main thread does. The kinds of the interfaces are asked for only where addresses have changed:
on macOS that starts a program.

The announced host is one of this program's own, ``splitinfer-ID.local``: addresses of the machine's own name would
conflict with the system's responder, which would then rename the machine.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Hashable, Sequence
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
    """The addresses at which a worker that listens on ``host`` is reached from other machines: not those of containers,
    virtual machines and VPNs, unless it listens on one of them."""
    ips = [str(each.ip) for one in interfaces if one.kind in _ANNOUNCED for each in one.networks]
    if host == _ANY_IPV4:
        return tuple(ip for ip in ips if ":" not in ip)
    if host == _ANY_IPV6:
        return tuple(ips)
    return (host,)


class Registered:
    """A worker that zeroconf announces at these addresses of this machine."""

    def __init__(self, announcement: Announcement, addresses: Sequence[str]) -> None:
        import zeroconf

        ipv4 = [each for each in addresses if ":" not in each]
        self._responder = zeroconf.Zeroconf(interfaces=ipv4 or zeroconf.InterfaceChoice.All)
        try:
            # The label is unique already: asking the network first would take most of a second on every link.
            self._responder.register_service(service_info(announcement, addresses), cooperating_responders=True)
        except BaseException:
            self._responder.close()
            raise

    def close(self) -> None:
        self._responder.close()  # says goodbye


def service_info(announcement: Announcement, addresses: Sequence[str]) -> "zeroconf.ServiceInfo":
    """The records of a worker. Raises OSError: one of the addresses is not an address."""
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
    """All addresses of this machine, and which interfaces are up."""
    up = frozenset(name for name, state in psutil.net_if_stats().items() if state.isup)
    return up, frozenset((name, each.address) for name, all_of in psutil.net_if_addrs().items() for each in all_of)


class Announcing:
    """Keeps the announcement of a worker that listens on ``host`` as it should be; none if ``announcement`` is
    ``None``. Nothing here fails the worker: what cannot be announced is logged. All methods are for one thread."""

    def __init__(
        self,
        announcement: Announcement | None,
        host: str,
        register: Callable[[Announcement, Sequence[str]], Registered] = Registered,
        interfaces: Callable[[], Sequence[LocalInterface]] = local_interfaces,
        numbers: Callable[[], Hashable] = _numbers,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._host, self._now = announcement, host, now
        self._register, self._interfaces, self._numbers = register, interfaces, numbers
        self._registration: Registered | None = None
        self._addresses: tuple[str, ...] = ()
        self._seen: Hashable = None
        self._look_due = now()
        self._said = ""

    def tick(self) -> None:
        """Announce what has changed; to be called about once a second. If that fails, it is said once, and tried again
        later."""
        if self._wanted is None or self._now() < self._look_due:
            return
        import zeroconf

        self._look_due = self._now() + _LOOK
        try:
            self._bring_up_to_date(self._wanted)
        except (OSError, RuntimeError, zeroconf.Error) as error:  # RuntimeError: it could use none of the interfaces
            self.close()
            self._look_due = self._now() + _RETRY
            if str(error) != self._said:
                self._said = str(error)
                log.warning("mDNS announcing stopped: %s; use the address instead", error)

    def _bring_up_to_date(self, announcement: Announcement) -> None:
        numbers = self._numbers()
        if numbers == self._seen:
            return
        addresses = addresses_of(self._host, self._interfaces())
        if addresses != self._addresses:
            self.close()
            if addresses:
                self._registration = self._register(announcement, addresses)
                self._addresses, self._said = addresses, ""
        self._seen = numbers

    def close(self) -> None:
        """Withdraw the announcement."""
        if self._registration is not None:
            import zeroconf

            with contextlib.suppress(OSError, RuntimeError, zeroconf.Error):
                self._registration.close()
        self._registration, self._addresses, self._seen = None, (), None
