"""A link to another stage, carried as its layout says, or, if it may be, by tcp."""

import logging
from typing import NamedTuple

from transports import Link, LinkOptions, TransportUnavailable, connect

log = logging.getLogger(__name__)


class Reached(NamedTuple):
    """A link; ``note`` is why it is not carried as was preferred, empty if it is."""

    link: Link
    note: str = ""


def reach(address: str, fallback: str, timeout: float, options: LinkOptions) -> Reached:
    """A link to ``address``, or to ``fallback`` (unless empty) where what should carry it is not to be had.

    Raises:
        TransportError: as ``transports.connect`` does; TransportUnavailable only without a fallback.
    """
    try:
        return Reached(connect(address, timeout=timeout, options=options))
    except TransportUnavailable as error:
        if not fallback:
            raise
        note = f"tcp in place of rdma: {error.reason}"
    log.info("%s: %s", fallback, note)
    return Reached(connect(fallback, timeout=timeout, options=options), note)
