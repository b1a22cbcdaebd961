"""Searches this machine's networks for workers, and measures the ways to them.

zeroconf browses. It is imported only then, because a layout with addresses does not need it. To measure the ways to a
found worker, this module connects to each of its addresses.

Sources: RFC 6762 (multicast DNS) and RFC 6763 (DNS-based service discovery).
"""

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from splitinfer.discovery.announcement import SERVICE, from_properties
from splitinfer.discovery.report import Look
from splitinfer.discovery.workers import KnownWorker, Route, in_order, merge, without_own
from splitinfer.system.interface_kind import LocalInterface, interface_of
from splitinfer.system.interfaces import local_interfaces

_MOST_SIGHTINGS = 4096  # a stranger may announce any number
_WAIT = 0.02  # seconds between two looks at the queue
_RECORDS_MS = 500  # for the records of an instance whose name is known
_ASK_AGAIN = 1.0  # seconds; RFC 6762, section 5.2
_CONNECTIONS, _CONNECT_SECONDS = 5, 1.5  # a machine in the same house needs milliseconds

Sightings = Generator[KnownWorker | None, None, None]
"""Yields each sighting of a worker, and None whenever nothing new was seen."""


# ----- browsing ------------------------------------------------------------------------------------


def browse(interfaces: Sequence[LocalInterface]) -> Sightings:
    """Yield sightings of workers without end. Raises OSError if this machine cannot search."""
    import zeroconf

    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    kind, unknown = f"{SERVICE}.local.", dict[str, float]()  # names without records yet, and when to ask again

    def changed(name: str, state_change: zeroconf.ServiceStateChange, **_: object) -> None:
        if state_change is not zeroconf.ServiceStateChange.Removed:  # a worker that left will not answer anyway
            names.put(name)

    try:
        chosen = [next(iter(each.ipv4), each.index) for each in interfaces if each.ipv4 or each.index]
        responder = zeroconf.Zeroconf(interfaces=chosen)
    except (OSError, RuntimeError, zeroconf.Error) as error:  # RuntimeError: it could use none of the interfaces
        raise OSError(f"multicast DNS does not work here: {error}") from error
    with responder:
        browser = zeroconf.ServiceBrowser(responder, kind, handlers=[changed])
        try:
            while True:
                name = _next(names, unknown)
                info = None
                if name is not None:
                    with contextlib.suppress(OSError, zeroconf.Error):  # an impossible name
                        info = responder.get_service_info(kind, name, timeout=_RECORDS_MS)
                        unknown |= {} if info else {name: time.monotonic() + _ASK_AGAIN}
                yield _sighting(info)
        finally:
            browser.cancel()


def _next(names: "queue.SimpleQueue[str]", unknown: dict[str, float]) -> str | None:
    """Return the next name to resolve: a new one, or an unknown one whose time has come."""
    with contextlib.suppress(queue.Empty):
        return names.get_nowait()
    due = next((name for name, at in unknown.items() if at <= time.monotonic()), None)
    if due is not None:
        del unknown[due]
    return due


def _sighting(info: Any) -> KnownWorker | None:
    if info is None or info.port is None:
        return None
    announcement = from_properties(info.properties, info.port)
    return None if announcement is None else KnownWorker(announcement, tuple(info.parsed_scoped_addresses()))


# ----- the ways to a worker ------------------------------------------------------------------------


def ways_of(worker: KnownWorker, interfaces: Sequence[LocalInterface]) -> tuple[Route, ...]:
    """Return the ways to a worker's addresses that are not this machine's own, the best first. To measure one, a TCP
    connection, which takes one round trip, is opened and closed. ``splitinfer doctor`` measures bandwidth, because that
    needs an admitted key and an idle worker."""
    port, addresses = worker.announcement.port, without_own(worker, interfaces).addresses
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return in_order(pool.map(lambda address: way_to(address, port, interfaces), addresses))


def way_to(address: str, port: int, interfaces: Sequence[LocalInterface]) -> Route:
    source, shortest = "", None
    for _ in range(_CONNECTIONS):
        begun = time.perf_counter()
        try:
            with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
                seconds = time.perf_counter() - begun
                source = str(connection.getsockname()[0])
        except (OSError, UnicodeError) as error:
            if shortest is None:
                return Route(address, None, None, _why(error))
            break
        shortest = seconds if shortest is None else min(shortest, seconds)
    return Route(address, interface_of(source, interfaces), shortest)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {_CONNECT_SECONDS:g} s"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ----- looking around ------------------------------------------------------------------------------


def look(seconds: float, is_enough: Callable[[Sequence[KnownWorker]], bool] = lambda _: False) -> Look:
    """Look for workers for at most ``seconds``, or until ``is_enough`` accepts the workers seen so far."""
    begun, seen, interfaces = time.monotonic(), list[KnownWorker](), tuple(local_interfaces())
    if not interfaces:
        return Look((), (), 0.0)
    problem = ""
    try:
        with contextlib.closing(browse(interfaces)) as sightings:
            for sighting in sightings:
                if sighting is None:
                    time.sleep(_WAIT)
                elif len(seen) < _MOST_SIGHTINGS:
                    seen.append(sighting)
                if (sighting is not None and is_enough(merge(seen))) or time.monotonic() >= begun + seconds:
                    break
    except OSError as error:
        problem = str(error)
    return Look(merge(seen), interfaces, time.monotonic() - begun, problem)
