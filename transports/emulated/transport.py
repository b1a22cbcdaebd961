"""Emulated links by address: `emulated+tcp://host:port?link=wifi&seed=3`, for `connect` and `listen`.

The address below is the address without `emulated+` and without the profile's part of the query; names that the inner
transport has in its own queries (`query_names`) are passed to it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from urllib.parse import parse_qsl, urlencode

from transports.address import errors_naming, split_scheme
from transports.base import AddressError, Link, LinkOptions, Listener, Transport
from transports.emulated.link import EmulatedLink
from transports.emulated.profile import LinkProfile, preset
from transports.framing import PRELUDE_BYTES

_PERFECT = LinkProfile()


@dataclass(frozen=True, slots=True)
class _ParsedAddress:
    """A parsed address: `emulated+tcp://host:port?link=wifi` -> `tcp://host:port`, `?link=wifi`, and its profile."""

    below: str
    query: str
    profile: LinkProfile
    both_ways: bool


class EmulatedTransport:
    """Another transport's links, emulated: `inner`'s addresses under a scheme of their own, with an optional query.

        ?link=wifi     a preset to start from, in place of `profile`
        &seed=3        any field of LinkProfile
        &both_ways=1   received frames are delayed as well, for a peer that is not emulated

    Each end emulates what it sends, so by default both ends should be given the same.
    """

    def __init__(self, inner: Transport, profile: LinkProfile | str = _PERFECT, *, scheme: str = "") -> None:
        self.scheme = scheme or f"emulated+{inner.scheme}"
        self._inner = inner
        self._profile = preset(profile)

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        parsed = self._parse(address)
        with errors_naming(address, parsed.below):
            below = self._inner.connect(parsed.below, timeout=timeout, options=_options_below(parsed.profile, options))
        return EmulatedLink(below, parsed.profile, both_ways=parsed.both_ways, options=options)

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        parsed = self._parse(address)
        with errors_naming(address, parsed.below):
            below = self._inner.listen(parsed.below, options=_options_below(parsed.profile, options))
        rest = split_scheme(below.address)[1].partition("?")[0]  # its query is part of `parsed.query`
        return EmulatedListener(below, f"{self.scheme}://{rest}{parsed.query}", parsed, options)

    def _parse(self, address: str) -> _ParsedAddress:
        _, rest = split_scheme(address)
        rest, mark, query = rest.partition("?")
        changes: dict[str, float | int] = {}
        for_below: dict[str, str] = {}
        profile, both_ways = self._profile, False
        try:
            for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
                if name == "link":
                    profile = preset(value)
                elif name == "both_ways":
                    both_ways = bool(int(value))
                elif name in getattr(self._inner, "query_names", ()):
                    for_below[name] = value
                else:
                    changes[name] = _number(name, value)
            profile = replace(profile, **changes)  # type: ignore[arg-type]  # _number returns each field's type
        except ValueError as problem:
            raise AddressError(f"{address!r}: {problem}") from None
        below = f"{self._inner.scheme}://{rest}" + (f"?{urlencode(for_below)}" if for_below else "")
        return _ParsedAddress(below, mark + query, profile, both_ways)


class EmulatedListener(Listener):
    def __init__(self, below: Listener, address: str, parsed: _ParsedAddress, options: LinkOptions) -> None:
        self.address = address
        self._below = below
        self._parsed = parsed
        self._options = options
        self._lock = threading.Lock()
        self._links: list[Link] = []

    def accept(self, timeout: float | None = None) -> Link:
        with errors_naming(self.address, self._below.address):
            below = self._below.accept(timeout)
        link = EmulatedLink(below, self._parsed.profile, both_ways=self._parsed.both_ways, options=self._options)
        with self._lock:
            self._links = [known for known in self._links if known.closed is None] + [link]
        return link

    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.abort(f"{self.address} stopped listening")
        self._below.close()


def _number(name: str, value: str) -> float | int:
    names = [field.name for field in fields(LinkProfile)]
    if name not in names:
        raise ValueError(f"unknown {name!r}; known: link, both_ways, {', '.join(names)}")
    return int(value) if name in ("seed", "cut_after_frames") else float(value)


def _options_below(profile: LinkProfile, options: LinkOptions) -> LinkOptions:
    """The options of the link below: packets have a longer header and a checksum of their own."""
    if not profile.needs_packets:
        return options
    max_header_bytes = min(options.max_header_bytes + PRELUDE_BYTES, (1 << 32) - 1)
    below = False if options.checksum_parts is False else None
    return replace(options, max_header_bytes=max_header_bytes, checksum_parts=below)
