"""Parses rdma://host:port[?backend=ring][&device=rdma_en5[:rdma_en3]].

`device` is only for JACCL: the connecting side's device and, after a colon, the listener's, if its name differs.
Without it each end takes its only active one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from transports.address import errors_naming, parse_host_port, split_scheme
from transports.base import AddressError

JACCL, RING = "jaccl", "ring"
BACKENDS = (JACCL, RING)

_DEVICES = re.compile(r"\w{1,32}(:\w{1,32})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RdmaAddress:
    """A parsed address. `rest`: `host:port`; `device`: "" if none was named."""

    rest: str
    backend: str = JACCL
    device: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; known: {', '.join(BACKENDS)}")
        if self.device and not _DEVICES.fullmatch(self.device):
            raise ValueError(f"{self.device!r} is not a device: one name, or here:there, such as rdma_en5:rdma_en3")

    @property
    def control(self) -> str:
        """The address of the control link."""
        return f"tcp://{self.rest}"

    @property
    def devices(self) -> tuple[str, str]:
        """The connecting side's device and the listener's; "" if none was named."""
        here, _, there = self.device.partition(":")
        return here, there or here

    def __str__(self) -> str:
        query = {"backend": "" if self.backend == JACCL else self.backend, "device": self.device}
        given = urlencode({name: value for name, value in query.items() if value}, safe=":")
        return f"rdma://{self.rest}" + (f"?{given}" if given else "")


def parse(address: str) -> RdmaAddress:
    """Parse an rdma:// address. Raises AddressError with the reason."""
    _, rest = split_scheme(address)
    rest, _, query = rest.partition("?")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        unknown = sorted(set(given) - {"backend", "device"})
        if unknown:
            raise ValueError(f"unknown {unknown[0]!r}; known: backend, device")
        parsed = RdmaAddress(rest, **given)
    except ValueError as problem:
        raise AddressError(f"{address!r}: {problem}") from None
    with errors_naming(address, parsed.control):
        parse_host_port(parsed.control)
    return parsed
