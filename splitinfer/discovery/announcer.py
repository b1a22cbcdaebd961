"""The process that announces a worker, `python -m splitinfer.discovery.announcer HOST`, and the worker's end of it.
HOST is the interface that the worker listens on.

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
from dataclasses import asdict, replace
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


def to_line(announcement: Announcement) -> str:
    """The announcement as one line of JSON."""
    return json.dumps(asdict(announcement)) + "\n"


def from_line(line: str) -> Announcement:
    """The announcement in a line."""
    fields = json.loads(line)
    return Announcement(**{**fields, "versions": Versions(**fields["versions"])})


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
    """An announced worker that listens on ``host``, or none if there is no ``announcement``. Nothing here fails the
    worker: what cannot be announced is logged. ``free``: reads the free memory, in bytes."""

    def __init__(
        self,
        announcement: Announcement | None,
        host: str,
        free: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        start: "Callable[[str], subprocess.Popen[bytes] | None] | None" = None,
    ) -> None:
        self._announcement, self._free, self._now = announcement, free, now
        self._due = now() + _EVERY
        self._process = None if announcement is None else (start or _start)(host)
        self._send()

    def tick(self) -> None:
        """Announce the free memory if it has changed; to be called about once a second."""
        if self._announcement is None or self._now() < self._due:
            return
        self._due = self._now() + _EVERY
        free = self._free()
        if abs(free - self._announcement.free) >= _WORTH * self._announcement.memory:
            self._announcement = replace(self._announcement, free=free)
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
        if self._announcement is None or self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # the process has ended, and has said why
            self._process.stdin.write(to_line(self._announcement).encode())
            self._process.stdin.flush()


def _start(host: str) -> "subprocess.Popen[bytes] | None":
    try:
        # A session of its own: Ctrl-C in the terminal is the worker's, which then says goodbye.
        return cleanup.start(
            (sys.executable, "-m", "splitinfer.discovery.announcer", host),
            stdin=subprocess.PIPE,
            start_new_session=True,
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
    """Keeps one announcement of a worker that listens on ``host`` as it should be; ``look`` is to be called every few
    seconds."""

    def __init__(
        self,
        host: str,
        register: Callable[[Announcement, Sequence[str]], Registered] = Registered,
        interfaces: Callable[[], Sequence[LocalInterface]] = local_interfaces,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._register, self._interfaces, self._now = host, register, interfaces, now
        self._wanted: Announcement | None = None
        self._announced: Announcement | None = None
        self._registration: Registered | None = None
        self._addresses: tuple[str, ...] = ()
        self._not_before = 0.0
        self._said = ""

    def announce(self, announcement: Announcement) -> None:
        """Announce this from now on."""
        self._wanted = announcement
        self.look()

    def look(self) -> None:
        """Announce what has changed; if that fails, say so once, and try again later."""
        import zeroconf

        if self._wanted is None or self._now() < self._not_before:
            return
        try:
            self._bring_up_to_date(self._wanted)
        except (OSError, RuntimeError, zeroconf.Error) as error:  # RuntimeError: it could use none of the interfaces
            self.close()
            self._not_before = self._now() + _RETRY
            if str(error) != self._said:
                self._said = str(error)
                _warn(error)

    def _bring_up_to_date(self, announcement: Announcement) -> None:
        addresses = addresses_of(self._host, self._interfaces())
        if addresses != self._addresses:
            self.close()
        if self._registration is None and addresses:
            self._registration = self._register(announcement, addresses)
            self._addresses, self._said = addresses, ""
        elif self._registration is not None and announcement != self._announced:
            self._registration.update(announcement)
        self._announced = announcement

    def close(self) -> None:
        """Withdraw the announcement."""
        if self._registration is not None:
            self._registration.close()
        self._registration, self._addresses = None, ()


def main() -> None:
    """Announce what standard input says, until it ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    announcer = Announcer(sys.argv[1])
    with open(0, "rb", buffering=0, closefd=False) as lines:  # select needs it unbuffered
        try:
            while True:
                if not select.select([lines], [], [], _LOOK)[0]:
                    announcer.look()
                elif line := lines.readline():
                    announcer.announce(from_line(line.decode()))
                else:
                    return
        except KeyboardInterrupt:
            pass
        finally:
            announcer.close()


if __name__ == "__main__":
    main()
