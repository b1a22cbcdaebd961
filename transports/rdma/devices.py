"""One group a device: a lock on each RDMA device, held as long as the process of its group lives.

A device has about 100 memory regions (mlx#3162), of which a group of two registers 64 (8 sizes of buffers, 2 of each,
for four purposes), and ten queue pairs (mlx PR 4209). A second group on one device fails in the middle of joining, with
an error that names neither. So who wants a group on a device claims it first.

A claim is a lock (`flock`) on a file named after the device. The descriptor is passed to the child, and the system
gives the lock back when the last process that has it is gone, however it ends: a child that cannot be killed, because
it hangs in the driver, keeps its device, as it must. No process leaves a lock behind; the empty files stay.

Users of one machine have a folder each, so a claim does not see another user's; JACCL's error does, then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from transports.base import TransportUnavailable
from transports.rdma import leftovers

_PID_BYTES = 32


class Claim(NamedTuple):
    """A lock on a device; `descriptor` is to be inherited by the process that uses the device."""

    device: str
    descriptor: int

    def release(self) -> None:
        """Give up this process's share, once; the device is free once the child has ended, too."""
        os.close(self.descriptor)


def claim(device: str, where: Path | None = None) -> Claim:
    """Claim a device.

    Raises:
        TransportUnavailable: another group has it.
    """
    path = (where or leftovers.folder()) / f"{device}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise TransportUnavailable(f"{device} cannot be claimed: {problem}") from problem
    if not _try_lock(descriptor):
        reason = _why_taken(device, descriptor)
        os.close(descriptor)
        raise TransportUnavailable(reason)
    with contextlib.suppress(OSError):  # only the message to others is worse without
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return Claim(device, descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _why_taken(device: str, descriptor: int) -> str:
    text = ""
    with contextlib.suppress(OSError):
        text = os.pread(descriptor, _PID_BYTES, 0).decode("ascii", "replace")
    holder = "this process" if text == str(os.getpid()) else f"process {text}" if text.isdigit() else "another process"
    return f"{device} carries a link of {holder} already, and a device has room for one (mlx#3162)"
