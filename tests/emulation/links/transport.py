"""Emulated links by address: `emulated+tcp://host:port?latency=0.003&seed=3`, for `connect` and `listen`.

    ?latency=0.003  any field of LinkProfile

Each end emulates what it sends, so by default both ends should be given the same. The address below is the address
without `emulated+` and without the profile's part of the query; the names of queries of rdma:// are passed to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlencode

from tests.emulation.links.link import EmulatedLink
from tests.emulation.links.profile import LinkProfile
from transports.address import errors_naming, split_scheme
from transports.base import AddressError, Link, LinkOptions, Listener, Transport
from transports.registry import TRANSPORTS, known


@contextlib.contextmanager
def installed(profile: LinkProfile) -> Iterator[None]:
    """For the length of a `with` block emulate every link that `connect` makes in this process, both ways.

    The peers stay as they are, and links made in the block stay emulated. Accepted links are not emulated, and neither
    are those between two other processes.
    """
    before = {scheme: TRANSPORTS[scheme] for scheme in known()}
    TRANSPORTS.update({scheme: _Slower(inner, profile) for scheme, inner in before.items()})
    try:
        yield
    finally:
        TRANSPORTS.update(before)


@dataclass(frozen=True, slots=True)
class _Slower:
    """Another transport, whose links are emulated at the end that connects."""

    inner: Transport
    profile: LinkProfile

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        below = self.inner.connect(address, timeout=timeout, options=options)
        return EmulatedLink(below, self.profile, both_ways=True, options=options)

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        return self.inner.listen(address, options=options)


@dataclass(frozen=True, slots=True)
class _ParsedAddress:
    """A parsed address: `emulated+tcp://host:port?seed=3` -> `tcp://host:port`, `?seed=3`, and its profile."""

    below: str
    query: str
    profile: LinkProfile

    def emulate(self, below: Link, options: LinkOptions) -> EmulatedLink:
        return EmulatedLink(below, self.profile, options=options)


class EmulatedTransport:
    """Another transport's links, emulated: `inner`'s addresses under a scheme of their own."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        parsed = self._parse(address)
        with errors_naming(address, parsed.below):
            return parsed.emulate(self._inner.connect(parsed.below, timeout=timeout, options=options), options)

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        parsed = self._parse(address)
        with errors_naming(address, parsed.below):
            return _EmulatedListener(self._inner.listen(parsed.below, options=options), parsed, options)

    def _parse(self, address: str) -> _ParsedAddress:
        scheme, rest = split_scheme(address)
        rest, mark, query = rest.partition("?")
        changes: dict[str, float | int] = {}
        for_below: dict[str, str] = {}
        try:
            for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
                if scheme == "emulated+rdma" and name in ("backend", "device"):
                    for_below[name] = value
                else:
                    changes[name] = _number(name, value)
            profile = LinkProfile(**changes)  # type: ignore[arg-type]  # _number returns each field's type
        except ValueError as problem:
            raise AddressError(f"{address!r}: {problem}") from None
        below = f"{scheme.removeprefix('emulated+')}://{rest}" + (f"?{urlencode(for_below)}" if for_below else "")
        return _ParsedAddress(below, mark + query, profile)


class _EmulatedListener(Listener):
    def __init__(self, below: Listener, parsed: _ParsedAddress, options: LinkOptions) -> None:
        rest = below.address.partition("?")[0]  # its query is part of `parsed.query`
        self.address = f"emulated+{rest}{parsed.query}"
        self._below = below
        self._parsed = parsed
        self._options = options

    def accept(self, timeout: float | None = None) -> Link:
        with errors_naming(self.address, self._below.address):
            return self._parsed.emulate(self._below.accept(timeout), self._options)

    def close(self) -> None:
        self._below.close()  # which ends its links, and with them those on top


def _number(name: str, value: str) -> float | int:
    names = [field.name for field in fields(LinkProfile)]
    if name not in names:
        raise ValueError(f"unknown {name!r}; known: {', '.join(names)}")
    return int(value) if name == "seed" else float(value)
