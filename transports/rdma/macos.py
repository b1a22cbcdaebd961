"""Judges whether the macOS versions of two ends fit each other, from the text that each sends of itself. Pure.

RDMA over Thunderbolt came with macOS 26.2 (Apple's TN3205). JACCL cuts a message into frames: of 4 KiB before macOS
26.3, and of up to 512 KiB from there on, each end by its own version (`buffer_size_from_message` in MLX's
mlx/distributed/jaccl/lib/jaccl/rdma.h). Two ends that cut differently wait for each other for ever, or take one frame
for another, and neither is told; so such a pair is refused before a group is joined.

A program built with an SDK older than macOS 26's is told 16 for 26 ("Is Tahoe really macOS 26 or 16?", The Eclectic
Light Company, 13 June 2025), and Python is such a program until it is built anew: 16.x is read as 26.x.

Not run on a Mac.
"""

from __future__ import annotations

import re

LEAST = (26, 2)  # has RDMA over Thunderbolt
LONG_FRAMES = (26, 3)  # JACCL's frames may be longer than 4 KiB
_COMPATIBLE, _TAHOE = 16, 26


def parse(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version such as 26.3.1; None if there are none."""
    found = re.match(r"(\d{1,4})(?:\.(\d{1,4}))?(?!\d)", text, re.ASCII)
    if found is None:
        return None
    major = int(found[1])
    return _TAHOE if major == _COMPATIBLE else major, int(found[2] or 0)


def why_too_old(text: str, subject: str = "this") -> str | None:
    """None if a Mac with this version has RDMA over Thunderbolt; else why not, as a sentence."""
    version = parse(text)
    if version is not None and version >= LEAST:
        return None
    found = "another system" if version is None else f"{version[0]}.{version[1]}"
    return f"RDMA over Thunderbolt needs macOS 26.2 or later, and {subject} is {found}"


def why_not_together(here: str, there: str) -> str | None:
    """None if the systems of two ends, as each names its own, can share a group; else why not, as a sentence."""
    reason = why_too_old(here, "one end") or why_too_old(there, "the other end")
    if reason is not None:
        return reason
    older, newer = sorted((parse(here) or LEAST, parse(there) or LEAST))
    if (older < LONG_FRAMES) is (newer < LONG_FRAMES):
        return None
    return (
        f"the two Macs have macOS {older[0]}.{older[1]} and {newer[0]}.{newer[1]}, and RDMA's frames have other sizes "
        "from 26.3 on: update the older one"
    )
