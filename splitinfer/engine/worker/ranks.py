"""How a rank of a stage across two machines meets the other one, over the control links, and joins a group with it.

MLX keeps a group until the process ends, and a sum cannot be cancelled if its peer is silent, frozen, or disconnected
by a pulled cable. (With `ring`, a sum whose peer was killed raises an error.) So a rank is a process that its
coordinator, or the worker that started it, may end at any moment.
"""

import logging
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable
from zlib import crc32

import mlx.core as mx

from splitinfer.core.link_transport import RING
from splitinfer.engine.links.cables import leads_over_cable, would_cross
from splitinfer.engine.stage.launched import Finished
from splitinfer.errors import PeerError
from splitinfer.models.load.halves import Pair
from splitinfer.wire.messages import Digest, Half
from transports import FrameError, TransportUnavailable
from transports.rdma.joining import check_sum, join_group
from transports.rdma.probe import device_for, is_down

log = logging.getLogger(__name__)

_EVERY = 16  # steps between two comparisons of both ranks' sampled tokens
_JOIN_SECONDS = 20  # MLX holds the GIL while it joins, and waits for ever for a peer that a firewall blocks
_LOOK_EVERY = 2.0  # seconds between checks of an RDMA cable, because RDMA raises no error when it is pulled


def join_ranks(half: Half, gather: Callable[[bytes], bytes]) -> Pair:
    """Join the group of both ranks, and return it. ``gather``: exchanges bytes with the other rank.

    Raises:
        PeerError: the ranks cannot meet, or their sums would cross a network without permission.
    """
    if half.sums == RING and not half.insecure and half.towards and not leads_over_cable(half.towards):
        raise PeerError(f"the sums of rank {half.rank} {would_cross(half.towards)}")

    def gather_in_time(data: bytes) -> bytes:
        signal.alarm(0)  # the other rank may arrive later
        found = gather(data)
        signal.alarm(_JOIN_SECONDS)
        return found

    try:
        device = device_for(half.sums, half.device)
        sums = join_group(half.sums, half.rank, device, half.own, half.towards, gather_in_time)
        check_sum(sums, half.rank)
    except (FrameError, TransportUnavailable, RuntimeError) as error:
        raise PeerError(f"rank {half.rank} cannot meet the other one over {half.sums}: {error}") from error
    finally:
        signal.alarm(0)
    if device:
        threading.Thread(target=_end_with, args=(device,), name="cable", daemon=True).start()
    mx.clear_cache()
    return Pair(half.rank, sums)


def _end_with(device: str) -> None:
    """End this process when the cable of an RDMA device is pulled. The coordinator sees that at once."""
    while not is_down(device):
        time.sleep(_LOOK_EVERY)
    log.error("the cable of %s, over which both ranks add up, is out", device)
    os._exit(1)


class Sampled:
    """Digests a rank's sampled tokens and busy seconds in a session. The coordinator compares the digests of both
    ranks, because RDMA was seen to deliver wrong numbers without an error (mlx#4342)."""

    def __init__(self) -> None:
        self._sum, self._busy = 0, 0.0

    def after(self, done: Finished) -> Digest | None:
        """Add a step. Return the digest of all steps so far if this one is due for a comparison, otherwise None."""
        figures = done.figures()
        self._busy += figures.ended - figures.started + figures.drafting
        for one in done.sampled:
            self._sum = crc32(array("q", [one.seq_id, *(token.token_id for token in one.tokens)]), self._sum)
        return None if done.plan.step % _EVERY else Digest(done.plan.step, self._sum, self._busy)
