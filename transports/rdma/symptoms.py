"""What to do about a group that could not be joined, from the text of the error. Pure.

JACCL reports the step that failed and a number (`Connection` in MLX's mlx/distributed/jaccl/lib/jaccl/rdma.cpp), from
which a person cannot tell a bridge that is still on from a Mac that must be restarted. The remedies are those that its
users found; each names where. The first symptom whose pattern is found counts, so the narrower ones come first.
"""

from __future__ import annotations

import re

_BRIDGE = (
    "the cable's port is likely still in the Thunderbolt bridge, or has no IPv4 address of its own, or the two devices "
    "are not at the two ends of one cable"
)
_RESTART = "restart this Mac if it stays so"
_ADDRESS = "give the port of the cable an IPv4 address of its own, which a restart may have undone"

SYMPTOMS = (  # a regular expression found in the error; what is likely wrong, and what to do
    (r"No IPv4-mapped GID", _ADDRESS),  # mlx PR 4191
    (r"RTR failed with errno 22\b", f"{_BRIDGE}; {_RESTART}"),  # mlx#3467, #3207
    (r"RTR failed with errno 96\b", f"{_BRIDGE}; after many groups since the last start, restart both Macs"),
    # mlx PR 4530, exo#1847: the peer's address is not on this cable; also after the addresses were set up twice
    (
        r"RTR failed with errno 60\b",
        "the other end is not on this cable: name the two ends' devices as device: here:there; if they are named, "
        "restart both Macs",
    ),
    # mlx PR 4209: the eleventh queue pair of a device, whoever holds the others; a retry never succeeds
    (
        r"queue pair\b.*errno 16\b|queue pair failed with errno 16|Couldn't create queue pair",
        "the device's ten queue pairs are taken: end other programs that use RDMA, or restart this Mac if one crashed",
    ),
    # mlx PR 4530: the port is down; mlx#3207: many groups made and ended; mlx#3777: there is no such device
    (
        r"allocate protection domain",
        "the port is down, or too many groups were made since the last start: check the cable, then restart this Mac",
    ),
    # mlx#3162: about 100 memory regions a device, of which a group of two takes 64
    (
        r"Register memory region failed",
        "the device has no memory regions left: end other programs that use RDMA, or restart this Mac",
    ),
    (r"Could not (find|open) device", "ibv_devices lists the names; they may change at a restart"),
    # a stale errno of a closed side channel: mlx PR 4530
    (r"Recv failed with errno=2\b", "the other end failed first, and its log says why"),
    # mlx#4192: a pulled cable ends the process inside the driver; mlx#4319: also without one
    (r"signal 1[01]\b", f"the RDMA driver ended the process: was the cable pulled? {_RESTART}"),
    (
        r"have not joined a group within|signal 14\b",
        "the two ends may be on different cables: name their devices as device: here:there",
    ),
    (
        r"cannot be listed: .*timed out",
        "the driver hangs: unplug the cable and plug it in again, or restart this Mac",  # exo#1711
    ),
)


def explained(error: str) -> str:
    """The error, followed by what to do about it if that is known; one sentence if the error is."""
    remedy = next((remedy for pattern, remedy in SYMPTOMS if re.search(pattern, error, re.DOTALL)), "")
    return f"{error}: {remedy}" if remedy and remedy not in error else error
