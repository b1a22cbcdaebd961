"""Connects to another stage by the transport of the layout, or by tcp where that is unavailable and allowed."""

import logging
from typing import NamedTuple

from splitinfer.system.gpu_roads import Road
from transports import Link, LinkOptions, TransportUnavailable, connect

log = logging.getLogger(__name__)

_RDMA = "rdma://"


class Reached(NamedTuple):
    """A link. ``note``: why it does not use the preferred transport; empty if it does."""

    link: Link
    note: str = ""


def reach(address: str, fallback: str, timeout: float, options: LinkOptions) -> Reached:
    """Connect to ``address``, or to ``fallback`` (unless empty) where the transport of ``address`` is unavailable.

    Raises:
        TransportError: as ``transports.connect``; TransportUnavailable only without a fallback.
    """
    if address.startswith(_RDMA) and not Road.RDMA.is_open:
        tcp = fallback or f"tcp://{address.removeprefix(_RDMA).partition('?')[0]}"
        return Reached(connect(tcp, timeout=timeout, options=options), f"tcp in place of rdma: {Road.RDMA} is 0")
    try:
        return Reached(connect(address, timeout=timeout, options=options))
    except TransportUnavailable as error:
        if not fallback:
            raise
        note = f"tcp in place of {address.partition('://')[0]}: {error.reason}"
    log.info("%s: %s", fallback, note)
    return Reached(connect(fallback, timeout=timeout, options=options), note)
