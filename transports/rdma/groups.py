"""Groups that outlive their link, so that the next link between the same two processes need not make another.

Making a group takes kernel objects that macOS does not give back reliably: after many groups the next one fails until a
restart (mlx#3207), and it takes a second. A coordinator that has lost one worker connects to the others again, perhaps
several times until the lost one is back, and nothing is wrong with their groups. So when a link ends, its group is
parked: the writer announces a rest, which takes the reader out of its receive, and both children say how many messages
they have sent or received. A parked child sleeps and holds its device.

The next handshake between the two processes names the group and the count. Only if both ends have it, parked, for the
same peer, and the reader has not received more than was sent, it is used again. What the reader has not received yet,
as the link ended before it could be woken, it receives and drops, each message with its number and checksum. Then both
children get the new link's nonce and add one number, which proves that nothing else is under way, and the group goes
on. Anything else, and both end their children and make a new group.

What cannot be kept: a group belongs to two processes and ends with the first of them; so a coordinator's ends with the
coordinator. Groups between two workers outlive coordinators. Nor is a group kept through whose link damaged or too few
messages came, nor one of `ring`, which costs nothing to make.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from transports.base import TransportUnavailable
from transports.rdma import devices
from transports.rdma.child_process import ChildProcess
from transports.rdma.devices import Claim

CLAIM_SECONDS = 5.0  # for the group of a link that is about to end; longer than a child may take to leave it
KEEP_SECONDS = 300.0  # a parked child takes the memory of a process with MLX, and keeps its device from others
_CHECK_SECONDS = 0.01


@dataclass(eq=False, slots=True)
class Group:
    """A group that was joined: this end's child, and what tells it from others.

    `number`: random, agreed by both ends when the group was joined. `peer`: what the next link must have in common with
    this one: the address that was connected to ("" at the listening end), and the peer's key. `num_messages`: sent or
    received in it, once it is parked.
    """

    process: ChildProcess
    peer: tuple[str, str | None]
    number: int = 0
    num_messages: int = -1
    is_kept: bool = False
    expiry: threading.Timer | None = None

    @property
    def device(self) -> str:
        return self.process.device

    def end(self) -> None:
        self.process.end()


class KeptGroups:
    """The parked groups of this process."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self.keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._kept: list[Group] = []

    def leave(self, group: Group, *, is_whole: bool) -> None:
        """A link has ended: park its group and keep it if that is sound, else end it. `is_whole`: the link knows of no
        fault of the group. By the thread that receives from the child."""
        count = group.process.park()
        if count is None or not is_whole:
            group.end()
            return
        group.num_messages, group.is_kept = count, True
        group.expiry = threading.Timer(self.keep_seconds, self._expire, (group,))
        group.expiry.name, group.expiry.daemon = f"rdma keeps {group.device}", True
        with self._lock:
            self._kept.append(group)
        group.expiry.start()  # does nothing if the group was taken, and the timer cancelled, meanwhile

    def obtain(self, device: str, is_it: Callable[[Group], bool], is_wanted: Callable[[], bool]) -> Group | Claim:
        """The parked group on `device` for which `is_it`, or else a claim on the device, where no process lives then.

        Other parked groups on it are ended. Links that are ending are waited for, up to CLAIM_SECONDS and as long as
        `is_wanted`.

        Raises:
            TransportUnavailable: another link has the device.
        """
        give_up_at = time.monotonic() + CLAIM_SECONDS
        while True:
            found = None
            for group in self._take(device):
                if found is None and is_it(group) and group.process.is_alive:
                    found = group
                else:
                    group.end()
            try:
                return found or devices.claim(device)
            except TransportUnavailable:
                if time.monotonic() >= give_up_at or not is_wanted():
                    raise
            time.sleep(_CHECK_SECONDS)

    def end_all(self) -> None:
        """End all parked groups."""
        for group in self._take(None):
            group.end()

    def _take(self, device: str | None) -> list[Group]:
        """Remove the groups on `device`, or all, from those that are kept."""
        with self._lock:
            taken = [group for group in self._kept if device in (group.device, None)]
            self._kept = [group for group in self._kept if group not in taken]
        for group in taken:
            if group.expiry is not None:
                group.expiry.cancel()
        return taken

    def _expire(self, group: Group) -> None:
        with self._lock:
            if group not in self._kept:
                return
            self._kept.remove(group)
        group.end()


kept_groups = KeptGroups()  # of this process: links of all its listeners and connectors share its devices
