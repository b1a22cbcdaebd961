"""Finds the transport of an address by its scheme, in `TRANSPORTS`; tests add theirs."""

from __future__ import annotations

from transports.address import split_scheme
from transports.base import DEFAULT_OPTIONS, AddressError, Link, LinkOptions, Listener, Transport
from transports.emulation import emulator
from transports.inproc import InprocTransport
from transports.rdma import RdmaTransport
from transports.tcp import TcpTransport

TRANSPORTS: dict[str, Transport] = {"inproc": InprocTransport(), "tcp": TcpTransport(), "rdma": RdmaTransport()}


def known() -> tuple[str, ...]:
    """Return the schemes, sorted, without the tests' schemes."""
    return tuple(sorted(scheme for scheme in TRANSPORTS if "+" not in scheme))


def connect(address: str, *, timeout: float, options: LinkOptions = DEFAULT_OPTIONS) -> Link:
    """Return a link to the listener at `address`, trying for `timeout` seconds: the listener may start later than this.

    Raises LinkTimeout naming the address and the seconds, LinkClosed with the reason if the listener refuses,
    AddressError.
    """
    return _find(address).connect(address, timeout=timeout, options=options)


def listen(address: str, *, options: LinkOptions = DEFAULT_OPTIONS) -> Listener:
    """Listen on `address`; port 0 picks a free one. Raises AddressInUse, AddressError."""
    return _find(address).listen(address, options=options)


def _find(address: str) -> Transport:
    scheme, _ = split_scheme(address)
    if scheme.startswith("emulated+") and scheme not in TRANSPORTS:
        emulator("links")  # adds its schemes
    if scheme not in TRANSPORTS:
        choices = ", ".join(f"{name}://" for name in known())
        raise AddressError(f"no transport for {scheme}:// (in {address!r}); known: {choices}")
    return TRANSPORTS[scheme]
