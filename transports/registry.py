"""Finds the transport of an address by its scheme. A new scheme is one `register` call."""

from __future__ import annotations

from collections.abc import Callable

from transports.address import split_scheme
from transports.base import DEFAULT_OPTIONS, AddressError, Link, LinkOptions, Listener, Transport
from transports.emulation import emulator

_PLUGINS = {"emulated": "links"}  # prefixes that an emulator registers when it is imported, on first use
_transports: dict[str, Transport] = {}
_prefixes: dict[str, Callable[[Transport], Transport]] = {}


def register(transport: Transport) -> None:
    """Use this transport for addresses of `transport.scheme`. Raises ValueError if the scheme is taken."""
    if transport.scheme in _transports:
        raise ValueError(f"the scheme {transport.scheme}:// is registered already")
    _transports[transport.scheme] = transport


def register_prefix(prefix: str, change: Callable[[Transport], Transport]) -> None:
    """Use, for addresses `prefix+scheme://`, the transport that `change` makes from the scheme's."""
    _prefixes[prefix] = change


def known() -> tuple[str, ...]:
    """The registered schemes, sorted."""
    return tuple(sorted(_transports))


def connect(address: str, *, timeout: float, options: LinkOptions = DEFAULT_OPTIONS) -> Link:
    """A link to the listener at `address`, trying for `timeout` seconds: the listener may start later than this.

    Raises LinkTimeout naming the address and the seconds, LinkClosed with the reason if the listener refuses,
    AddressError.
    """
    return _find(address).connect(address, timeout=timeout, options=options)


def listen(address: str, *, options: LinkOptions = DEFAULT_OPTIONS) -> Listener:
    """Listen on `address`; port 0 picks a free one. Raises AddressInUse, AddressError."""
    return _find(address).listen(address, options=options)


def _find(address: str) -> Transport:
    scheme, _ = split_scheme(address)
    prefix, plus, plain = scheme.partition("+")
    if plus and prefix in _PLUGINS and prefix not in _prefixes:
        emulator(_PLUGINS[prefix])
    if plus and prefix in _prefixes and plain in _transports:
        return _prefixes[prefix](_transports[plain])
    if scheme not in _transports:
        choices = ", ".join(f"{name}://" for name in known())
        raise AddressError(f"no transport for {scheme}:// (in {address!r}); known: {choices}")
    return _transports[scheme]
