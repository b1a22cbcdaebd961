"""Every link that this process connects, emulated: nobody who calls `connect` has to know.

`install` hands the registry a function that wraps what `connect` made. Both directions are delayed on this side, so
the peers stay as they are; hence nothing that needs packets. A link that two other processes make between themselves
is out of reach from here: they get an address that says the same (`address_for_others`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlencode

from transports.base import Link, LinkOptions
from transports.emulated.link import EmulatedLink, emulate
from transports.emulated.profile import PACKET_FAULTS, LinkProfile, preset
from transports.registry import connected_wrap, wrap_connected


def install(profile: LinkProfile | str | None) -> None:
    """From now on every link that `connect` makes in this process is emulated, both ways; None: no longer.

    One side is enough, the peers are as they always are. Links that a listener accepts are left alone, and so are those
    that two other processes make between themselves: whoever sends them to each other does so by `address_for_others`.
    Raises ValueError as `emulate` does.
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


def address_for_others(address: str) -> str:
    """By this address another process makes the link that `connect(address)` makes in this one: as emulated as here."""
    wrap = connected_wrap()
    return wrap.address(address) if isinstance(wrap, _BothWays) else address


class _BothWays:
    """What `install` does to a link, and the address that says the same."""

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
