"""The process that announces a worker: `python -m splitinfer.discovery.announcer`, started by the worker.

It is a process of its own because it reads what strangers send to port 5353, and because the worker's threads have
better things to do. Its standard input is the worker's: each line is what to announce from now on, as JSON; the end of
it, however the worker ended, withdraws the announcement.

Interfaces come and go, as when a Thunderbolt cable is plugged in. zeroconf does not see that, so the addresses are
looked at every few seconds and announced anew when they are others.
"""

import json
import logging
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from splitinfer.discovery.announcement import Announcement
from splitinfer.discovery.means import Means, MeansFailed, Registration, means_here
from splitinfer.system.interface_kind import Kind, LocalInterface
from splitinfer.system.interfaces import local_interfaces
from splitinfer.wire.messages import Versions

log = logging.getLogger(__name__)

_LOOK, _RETRY = 5.0, 30.0  # seconds
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


class Announcer:
    """Keeps one announcement as it should be; ``look`` is to be called every few seconds."""

    def __init__(
        self,
        means: Means,
        interfaces: Callable[[], Sequence[LocalInterface]] = local_interfaces,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._means, self._interfaces, self._now = means, interfaces, now
        self._order: Order | None = None
        self._registration: Registration | None = None
        self._addresses: tuple[str, ...] = ()
        self._not_before = 0.0
        self._said = ""

    def obey(self, order: Order) -> None:
        """Announce this from now on."""
        is_new = self._order is None or order != self._order
        self._order = order
        if self._registration is not None and is_new:
            self._carefully(self._registration.update, order.announcement)
        self.look()

    def look(self) -> None:
        """Announce anew if this machine's addresses are others, or what announced has failed."""
        if self._order is None or self._now() < self._not_before:
            return
        if self._registration is not None and not self._carefully(self._registration.check):
            return
        addresses = addresses_of(self._order.host, self._interfaces())
        if self._registration is not None and addresses == self._addresses:
            return
        self.close()
        if addresses:
            self._addresses = addresses
            self._carefully(self._begin, self._order.announcement)

    def close(self) -> None:
        """Withdraw the announcement."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def _begin(self, announcement: Announcement) -> None:
        self._registration = self._means.announce(announcement, self._addresses)
        self._said = ""

    def _carefully(self, act: Callable[..., None], *arguments: object) -> bool:
        """Act, and whether that went well; if not, withdraw, say so once, and try again later."""
        try:
            act(*arguments)
            return True
        except MeansFailed as error:
            if str(error) != self._said:
                log.warning("the worker cannot be found by `splitinfer discover`: %s", error)
            self._said = str(error)
            self._not_before = self._now() + _RETRY
            self.close()
            return False


def main() -> None:
    """Announce what standard input says, until it ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    means = means_here()
    if means is None:
        return
    announcer = Announcer(means)
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
