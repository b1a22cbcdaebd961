"""The process that announces a worker, `python -m splitinfer.discovery.announcer`, and the worker's end of it.

It is a process of its own because it reads what strangers send to port 5353, and because the worker's threads have
better things to do. Its standard input is the worker's: each line is what to announce from now on, as JSON; the end of
it, however the worker ended, withdraws the announcement.

Interfaces come and go, as when a Thunderbolt cable is plugged in. zeroconf does not see that, so the addresses are
looked at every few seconds and announced anew when they are others. The announced host is one of this program's own,
``splitinfer-ID.local``: announcing addresses of the machine's own name would conflict with the system's responder,
which would then rename the machine.
"""

import contextlib
import json
import logging
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from splitinfer import cleanup
from splitinfer.discovery.announcement import SERVICE, Announcement, to_properties
from splitinfer.system.interface_kind import Kind, LocalInterface
from splitinfer.system.interfaces import local_interfaces
from splitinfer.wire.messages import Versions

if TYPE_CHECKING:
    import zeroconf

log = logging.getLogger(__name__)

_LOOK, _RETRY = 5.0, 30.0  # seconds
_EVERY = 60.0  # seconds between two looks at the free memory
_WORTH = 0.05  # of all memory: a smaller change is not announced, because each is sent to every device
_ENDING = 1.0  # seconds for a goodbye
_ANNOUNCED = (Kind.THUNDERBOLT, Kind.CABLE, Kind.WIRELESS)
_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


@dataclass(frozen=True, slots=True)
class Order:
    """What to announce. ``host``: the interface that the worker listens on, as it was given."""

    announcement: Announcement
    host: str


def order_to_line(order: Order) -> str:
    """The order as one line of JSON."""
    return json.dumps(asdict(order)) + "\n"


def order_from_line(line: str) -> Order:
    """The order in a line."""
    fields = json.loads(line)
    announced = fields["announcement"]
    announced["versions"] = Versions(**announced["versions"])
    return Order(Announcement(**announced), fields["host"])


def addresses_of(host: str, interfaces: Sequence[LocalInterface]) -> tuple[str, ...]:
    """The addresses at which a worker that listens on ``host`` is reached from other machines: not those of containers,
    virtual machines and VPNs, unless it listens on one of them."""
    ips = [str(each.ip) for one in interfaces if one.kind in _ANNOUNCED for each in one.networks]
    if host == _ANY_IPV4:
        return tuple(ip for ip in ips if ":" not in ip)
    if host == _ANY_IPV6:
        return tuple(ips)
    return (host,)


# ----- the worker's end ----------------------------------------------------------------------------


class Announcing:
    """An announced worker, or none if there is no ``order``. Nothing here fails the worker: what cannot be announced is
    logged. ``free``: reads the free memory, in bytes."""

    def __init__(
        self,
        order: Order | None,
        free: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        start: "Callable[[], subprocess.Popen[bytes] | None] | None" = None,
    ) -> None:
        self._order, self._free, self._now = order, free, now
        self._due = now() + _EVERY
        self._process = None if order is None else (start or _start)()
        self._send()

    def tick(self) -> None:
        """Announce the free memory if it has changed; to be called about once a second."""
        if self._order is None or self._now() < self._due:
            return
        self._due = self._now() + _EVERY
        announcement, free = self._order.announcement, self._free()
        if abs(free - announcement.free) >= _WORTH * announcement.memory:
            self._order = replace(self._order, announcement=replace(announcement, free=free))
            self._send()

    def withdraw(self) -> None:
        """Have the announcement withdrawn, without waiting."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """Withdraw the announcement, and wait a moment for that."""
        self.withdraw()
        if self._process is not None:
            try:
                self._process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _send(self) -> None:
        if self._order is None or self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # the process has ended, and has said why
            self._process.stdin.write(order_to_line(self._order).encode())
            self._process.stdin.flush()


def _start() -> "subprocess.Popen[bytes] | None":
    try:
        # A session of its own: Ctrl-C in the terminal is the worker's, which then says goodbye.
        return cleanup.start(
            (sys.executable, "-m", "splitinfer.discovery.announcer"), stdin=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        _warn(error)
        return None


def _warn(why: object) -> None:
    log.warning("mDNS announcing stopped: %s; use the address instead", why)


# ----- the process ---------------------------------------------------------------------------------


class Registered:
    """A worker that zeroconf announces at these addresses of this machine."""

    def __init__(self, announcement: Announcement, addresses: Sequence[str]) -> None:
        import zeroconf

        self._addresses = tuple(addresses)
        ipv4 = [each for each in addresses if ":" not in each]
        self._responder = zeroconf.Zeroconf(interfaces=ipv4 or zeroconf.InterfaceChoice.All)
        try:
            # The label is unique already: asking the network first would take most of a second on every link.
            self._responder.register_service(service_info(announcement, self._addresses), cooperating_responders=True)
        except BaseException:
            self._responder.close()
            raise

    def update(self, announcement: Announcement) -> None:
        self._responder.update_service(service_info(announcement, self._addresses))

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


class Announcer:
    """Keeps one announcement as it should be; ``look`` is to be called every few seconds."""

    def __init__(
        self,
        register: Callable[[Announcement, Sequence[str]], Registered] = Registered,
        interfaces: Callable[[], Sequence[LocalInterface]] = local_interfaces,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._register, self._interfaces, self._now = register, interfaces, now
        self._order: Order | None = None
        self._announced: Order | None = None
        self._registration: Registered | None = None
        self._addresses: tuple[str, ...] = ()
        self._not_before = 0.0
        self._said = ""

    def obey(self, order: Order) -> None:
        """Announce this from now on."""
        self._order = order
        self.look()

    def look(self) -> None:
        """Announce what has changed; if that fails, say so once, and try again later."""
        import zeroconf

        if self._order is None or self._now() < self._not_before:
            return
        try:
            self._bring_up_to_date(self._order)
        except (OSError, RuntimeError, zeroconf.Error) as error:  # RuntimeError: it could use none of the interfaces
            self.close()
            self._not_before = self._now() + _RETRY
            if str(error) != self._said:
                self._said = str(error)
                _warn(error)

    def _bring_up_to_date(self, order: Order) -> None:
        addresses = addresses_of(order.host, self._interfaces())
        if addresses != self._addresses:
            self.close()
        if self._registration is None and addresses:
            self._registration = self._register(order.announcement, addresses)
            self._addresses, self._said = addresses, ""
        elif self._registration is not None and order != self._announced:
            self._registration.update(order.announcement)
        self._announced = order

    def close(self) -> None:
        """Withdraw the announcement."""
        if self._registration is not None:
            self._registration.close()
        self._registration, self._addresses = None, ()


def main() -> None:
    """Announce what standard input says, until it ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    announcer = Announcer()
    with open(0, "rb", buffering=0, closefd=False) as orders:  # select needs it unbuffered
        try:
            while True:
                if not select.select([orders], [], [], _LOOK)[0]:
                    announcer.look()
                elif line := orders.readline():
                    announcer.obey(order_from_line(line.decode()))
                else:
                    return
        except KeyboardInterrupt:
            pass
        finally:
            announcer.close()


if __name__ == "__main__":
    main()
