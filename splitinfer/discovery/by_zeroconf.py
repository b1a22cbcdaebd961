"""Browses and announces with python-zeroconf, which speaks multicast DNS itself, beside the system's responder.

The announced host is one of this program's own, ``splitinfer-ID.local``: announcing addresses of the machine's own name
would conflict with the system's responder, which would then rename the machine.
"""

import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zeroconf

from splitinfer.discovery.announcement import SERVICE, Announcement, from_strings, to_strings
from splitinfer.discovery.means import MeansFailed
from splitinfer.discovery.txt import strings_of
from splitinfer.discovery.workers import Sighting
from splitinfer.system.interface_kind import LocalInterface

_TYPE = f"{SERVICE}.local."
_WAIT = 0.1  # seconds between two questions whether it is over
_RECORDS_MS = 500  # for the records of an instance whose name is known
_RETRY = 1.0  # seconds

_ERRORS = (OSError, zeroconf.Error, RuntimeError)  # RuntimeError: none of the interfaces could be used


class ByZeroconf:
    """See ``means.Means``."""

    name = "zeroconf"

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        names: queue.SimpleQueue[str] = queue.SimpleQueue()
        unknown: dict[str, float] = {}  # names without records, and when to ask again
        with _opened(_choice(interfaces)) as responder:
            browser = zeroconf.ServiceBrowser(responder, _TYPE, listener=_Listener(names))
            try:
                while not is_over():
                    name = _next(names, unknown)
                    if name is not None and not _resolve(responder, name, put):
                        unknown[name] = time.monotonic() + _RETRY
            finally:
                browser.cancel()

    def announce(self, announcement: Announcement, addresses: Sequence[str]) -> "_Announced":
        return _Announced(announcement, addresses)


class _Listener:
    """See zeroconf.ServiceListener. Puts the names of instances that appear or change into a queue, from zeroconf's
    thread."""

    def __init__(self, names: "queue.SimpleQueue[str]") -> None:
        self._names = names

    def add_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        self._names.put(name)

    def update_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        self._names.put(name)

    def remove_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        """A goodbye while browsing: it is then found not to answer."""


class _Announced:
    """See ``means.Registration``."""

    def __init__(self, announcement: Announcement, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        interfaces = [each for each in addresses if _family(each) == socket.AF_INET]
        try:
            self._responder = zeroconf.Zeroconf(interfaces=interfaces or zeroconf.InterfaceChoice.All)
        except _ERRORS as error:
            raise MeansFailed(_why(error)) from error
        try:
            # The label is unique already: asking the network first would take most of a second on every link.
            self._responder.register_service(service_info(announcement, self._addresses), cooperating_responders=True)
        except _ERRORS as error:
            self._responder.close()
            raise MeansFailed(_why(error)) from error

    def update(self, announcement: Announcement) -> None:
        try:
            self._responder.update_service(service_info(announcement, self._addresses))
        except _ERRORS as error:
            raise MeansFailed(_why(error)) from error

    def check(self) -> None:
        """It is announced as long as this process lives."""

    def close(self) -> None:
        self._responder.close()  # says goodbye


def service_info(announcement: Announcement, addresses: Sequence[str]) -> zeroconf.ServiceInfo:
    """The records of a worker. Raises OSError: an address is none."""
    pairs = [each.partition(b"=") for each in to_strings(announcement)]
    return zeroconf.ServiceInfo(
        _TYPE,
        f"{announcement.label}.{_TYPE}",
        port=announcement.port,
        properties={key: value for key, _, value in pairs},
        server=f"splitinfer-{announcement.id}.local.",
        addresses=[socket.inet_pton(_family(each), each.partition("%")[0]) for each in addresses],
    )


def _resolve(responder: zeroconf.Zeroconf, name: str, put: Callable[[Sighting], None]) -> bool:
    """Get an instance's records; whether there were any."""
    try:
        info = responder.get_service_info(_TYPE, name, timeout=_RECORDS_MS)
    except _ERRORS:  # such as a name that is none
        return True
    if info is None or info.port is None:
        return False
    announcement = from_strings(strings_of(info.text or b""), info.port)
    if announcement is not None:
        put(Sighting(announcement, tuple(info.parsed_scoped_addresses())))
    return True


def _next(names: "queue.SimpleQueue[str]", unknown: dict[str, float]) -> str | None:
    """The next name to resolve: a new one, or an unknown one whose time has come."""
    try:
        return names.get(timeout=_WAIT)
    except queue.Empty:
        due = next((name for name, at in unknown.items() if at <= time.monotonic()), None)
        if due is not None:
            del unknown[due]
        return due


def _choice(interfaces: Sequence[LocalInterface]) -> list[str | int]:
    """The interfaces as zeroconf takes them: an IPv4 address of each, or its index."""
    return [next(iter(each.ipv4), each.index) for each in interfaces if each.ipv4 or each.index]


@contextmanager
def _opened(interfaces: list[str | int]) -> Iterator[zeroconf.Zeroconf]:
    try:
        responder = zeroconf.Zeroconf(interfaces=interfaces)
    except _ERRORS as error:
        raise MeansFailed(_why(error)) from error
    try:
        yield responder
    finally:
        responder.close()


def _why(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return f"zeroconf failed: {reason}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
