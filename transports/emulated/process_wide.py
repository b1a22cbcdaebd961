"""Emulates every link that this process connects, without a change to callers of `connect`.

`install` gives the registry a function that wraps each link. Both directions are delayed on this side, so
the peers stay as they are; hence faults that need packets are refused. Links between two other processes cannot be
wrapped here: those processes are given an address with the same profile (`transports.address_for_others`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlencode

from transports.base import Link, LinkOptions
from transports.emulated.link import EmulatedLink, emulate
from transports.emulated.profile import PACKET_FAULTS, LinkProfile, preset
from transports.registry import wrap_connected


def install(profile: LinkProfile | str | None) -> None:
    """From now on emulate every link that `connect` makes in this process, both ways; None: no longer.

    The peers stay as they are. Accepted links are not emulated, and neither are those between two other processes:
    those need addresses from `transports.address_for_others`. Raises ValueError as `emulate` does.
    """
    wrap_connected(None if profile is None else _BothWays(profile))


@contextlib.contextmanager
def installed(profile: LinkProfile | str) -> Iterator[None]:
    """`install` for the length of a `with` block; links made in it stay emulated."""
    before = wrap_connected(_BothWays(profile))
    try:
        yield
    finally:
        wrap_connected(before)


class _BothWays:
    """Wraps a link for `install`, and makes the address that has the same effect."""

    def __init__(self, profile: LinkProfile | str) -> None:
        self._profile = preset(profile)
        if self._profile.needs_packets:
            raise ValueError(f"{', '.join(PACKET_FAULTS)} cannot be emulated from one side")

    def __call__(self, link: Link, options: LinkOptions) -> Link:
        return link if isinstance(link, EmulatedLink) else emulate(link, self._profile, both_ways=True, options=options)

    def address(self, address: str) -> str:
        if address.startswith("emulated+"):
            return address
        values = ((field.name, getattr(self._profile, field.name), field.default) for field in fields(LinkProfile))
        query = {name: repr(value) for name, value, default in values if value != default}
        mark = "&" if "?" in address else "?"
        return f"emulated+{address}{mark}{urlencode({**query, 'both_ways': 1})}"
