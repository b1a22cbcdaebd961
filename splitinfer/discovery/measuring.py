"""Connects to each address of a worker, and says how long that took and by which interface it went.

A TCP connection takes one round trip. It is closed at once: whoever has no key gets nothing from a worker, and this
asks for nothing. Bandwidth is not measured, because that needs an admitted key and an idle worker: ``splitinfer
doctor`` does.
"""

import ipaddress
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from splitinfer.discovery.choosing import Way, in_order
from splitinfer.discovery.workers import Worker
from splitinfer.system.interface_kind import LocalInterface

_CONNECTIONS = 5
_SECONDS = 1.5  # for one; a machine in the same house takes a thousandth


def ways_to(worker: Worker, interfaces: Sequence[LocalInterface]) -> tuple[Way, ...]:
    """The ways to a worker's addresses, the best first."""
    port = worker.announcement.port
    with ThreadPoolExecutor(max(1, len(worker.addresses))) as pool:
        return in_order(pool.map(lambda address: _way(address, port, interfaces), worker.addresses))


def _way(address: str, port: int, interfaces: Sequence[LocalInterface]) -> Way:
    source, shortest = "", None
    for _ in range(_CONNECTIONS):
        begun = time.perf_counter()
        try:
            with socket.create_connection((address, port), _SECONDS) as connection:
                seconds = time.perf_counter() - begun
                source = str(connection.getsockname()[0])
        except (OSError, UnicodeError) as error:
            if shortest is None:
                return Way(address, None, None, _why(error))
            break
        shortest = seconds if shortest is None else min(shortest, seconds)
    return Way(address, _interface_of(source, interfaces), shortest)


def _interface_of(source: str, interfaces: Sequence[LocalInterface]) -> LocalInterface | None:
    """The interface that has this address."""
    number, _, scope = source.partition("%")
    if scope:
        return next((each for each in interfaces if scope in (each.name, str(each.index))), None)
    ip = ipaddress.ip_address(number)
    return next((each for each in interfaces if any(ip == network.ip for network in each.networks)), None)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {_SECONDS:g} s"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
