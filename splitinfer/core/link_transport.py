"""The transport of the link to a stage from the one before it, which carries hidden states.

``tcp`` works everywhere. ``rdma`` is Thunderbolt 5 between two Macs (or, with the backend ``ring``, MLX's sockets, to
run the same code without the hardware). ``auto`` prefers ``rdma`` and uses ``tcp`` if either end cannot use it.
"""

import re
from dataclasses import dataclass

TCP, RDMA, AUTO = "tcp", "rdma", "auto"
TRANSPORTS = (TCP, RDMA, AUTO)
JACCL, RING = "jaccl", "ring"
BACKENDS = (JACCL, RING)

_DEVICE = re.compile(r"\w{1,32}(:\w{1,32})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class LinkTransport:
    """A transport and its options. ``device``: the RDMA device, if a machine has several: one name, or this end's and
    the worker's as ``a:b``."""

    transport: str = TCP
    backend: str = JACCL
    device: str | None = None

    @property
    def mistake(self) -> str | None:
        """The mistake in it, as a phrase that follows the stage's name; ``None`` if it is right."""
        if self.transport not in TRANSPORTS:
            return f"has the transport {self.transport!r}, which is unknown; known: {', '.join(TRANSPORTS)}"
        if self.backend not in BACKENDS:
            return f"has the backend {self.backend!r}, which is unknown; known: {', '.join(BACKENDS)}"
        if self.transport == TCP and self != OVER_TCP:
            return "has a backend or a device, which only transport rdma or auto uses"
        if self.device is not None and (self.backend != JACCL or not _DEVICE.fullmatch(self.device)):
            return f"has the device {self.device!r}: it is a name such as rdma_en5, or two, here:there, and for jaccl"
        return None

    def addresses(self, tcp: str) -> tuple[str, str]:
        """Return the address for the worker at ``tcp`` and the fallback address, which may be empty."""
        if self.transport == TCP:
            return tcp, ""
        given = [f"backend={self.backend}"] * (self.backend != JACCL) + [f"device={self.device}"] * bool(self.device)
        query = f"?{'&'.join(given)}" if given else ""
        return tcp.replace("tcp://", "rdma://", 1) + query, tcp if self.transport == AUTO else ""


OVER_TCP = LinkTransport()
