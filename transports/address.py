"""Parses addresses: `scheme://rest`, and for schemes with hosts `scheme://host:port`.

IPv6 addresses stand in brackets, as in a URL: `tcp://[fe80::1%en5]:5577`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from transports.base import AddressError, AddressInUse, LinkTimeout, ListenerClosed


class HostPort(NamedTuple):
    """A host name or number (no brackets) and a port, 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def split_scheme(address: str) -> tuple[str, str]:
    """Return the scheme and the rest: `tcp://a:1` -> ("tcp", "a:1"). Raises AddressError if either is missing."""
    scheme, mark, rest = address.partition("://")
    if not (scheme and mark and rest):
        raise AddressError(f"{address!r} is not an address: it should look like tcp://host:port")
    return scheme.lower(), rest


def parse_host_port(address: str) -> HostPort:
    """Return the host and port of `scheme://host:port`. Raises AddressError with the reason."""
    _, rest = split_scheme(address)
    host, colon, port = rest.rpartition(":")
    if not colon or not host or rest.endswith("]"):
        raise AddressError(f"{address!r} needs a host and a port: tcp://host:port")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise AddressError(f"{address!r} has the port {port!r}; a port is a number from 0 to 65535")
    return HostPort(_without_brackets(address, host), int(port))


def _without_brackets(address: str, host: str) -> str:
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1]
    if any(mark in host for mark in ":[]/ "):
        raise AddressError(f"{address!r} has the host {host!r}; an IPv6 address stands in brackets: tcp://[::1]:5577")
    return host


@contextlib.contextmanager
def errors_naming(address: str, below: str) -> Iterator[None]:
    """Replace `below` by `address`, which the caller used, in the messages of errors raised in a `with` block."""
    try:
        yield
    except LinkTimeout as problem:
        raise LinkTimeout(str(problem).replace(below, address), problem.unreachable) from problem
    except (AddressError, AddressInUse, ListenerClosed) as problem:
        raise type(problem)(str(problem).replace(below, address)) from problem
