"""Whether multicast DNS gets through at all, on each interface: asks every device which services it has, and counts the
devices that are heard.

What is found tells nothing where nothing is found: a network without workers and a network whose router drops
multicasts look the same. So the question of RFC 6763, section 9, which every responder answers, is sent on each
interface, and the addresses are counted from which anything came. Nothing that came is parsed.

Each interface has two sockets. One hears what is sent to the group: it is bound to the group's address, so that it
takes no answer away that is meant for another program at the port, and hears only the interface where it joined the
group; Linux needs ``IP_MULTICAST_ALL`` off for that (ip(7)), macOS does so by itself (*assumed*). The other asks, from
a port of its own, and so is answered directly (RFC 6762, section 6.7).
"""

import contextlib
import select
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitinfer.system.interface_kind import LocalInterface

_GROUP, _PORT = "224.0.0.251", 5353
_QUESTION = (
    b"\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00"  # one question
    b"\x09_services\x07_dns-sd\x04_udp\x05local\x00\x00\x0c\x00\x01"  # for PTR records
)
_ALL = 49  # IP_MULTICAST_ALL in linux/in.h; the socket module has no name for it
_ASK_AGAIN = 1.0  # seconds; RFC 6762, section 5.2
_MOST_SOURCES = 999


@dataclass(slots=True)
class Heard:
    """What was heard on an interface: the addresses of other devices. ``problem``: why it could not be asked."""

    interface: LocalInterface
    sources: set[str] = field(default_factory=set)
    problem: str = ""


class Overhearing:
    """Listens and asks in a thread of its own while the ``with`` block runs."""

    def __init__(self, interfaces: Sequence[LocalInterface]) -> None:
        self._own = {address for each in interfaces for address in each.ipv4}
        self.heard = [Heard(each) for each in interfaces]
        self._sockets: dict[socket.socket, Heard] = {}
        self._askers: dict[socket.socket, Heard] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="overhearing", daemon=True)

    def __enter__(self) -> "Overhearing":
        for heard in self.heard:
            self._open(heard)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _open(self, heard: Heard) -> None:
        address = next(iter(heard.interface.ipv4), None)
        if address is None:
            heard.problem = "it has no IPv4 address"
            return
        try:
            self._sockets[_listening(address)] = heard
            asking = _asking(address)
            self._sockets[asking] = self._askers[asking] = heard
        except OSError as error:
            heard.problem = error.strerror or str(error)

    def _listen(self) -> None:
        while not self._is_over.is_set():
            for each, heard in self._askers.items():
                _ask(each, heard)
            for _ in range(10):
                if not self._is_over.is_set():
                    self._receive(_ASK_AGAIN / 10)

    def _receive(self, seconds: float) -> None:
        if not self._sockets:
            self._is_over.wait(seconds)
            return
        for each in select.select(list(self._sockets), [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                source = str(each.recvfrom(9000)[1][0])
                sources = self._sockets[each].sources
                if source not in self._own and len(sources) < _MOST_SOURCES:
                    sources.add(source)


def _listening(address: str) -> socket.socket:
    """A socket that hears the group on the interface with this address."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sys.platform == "linux":
            made.setsockopt(socket.IPPROTO_IP, _ALL, 0)
        made.bind((_GROUP, _PORT))
        made.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP) + socket.inet_aton(address)
        )
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _asking(address: str) -> socket.socket:
    """A socket that sends to the group on the interface with this address."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        made.bind((address, 0))
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _ask(each: socket.socket, heard: Heard) -> None:
    try:
        each.sendto(_QUESTION, (_GROUP, _PORT))
        heard.problem = ""
    except BlockingIOError:
        pass
    except OSError as error:
        heard.problem = error.strerror or str(error)
