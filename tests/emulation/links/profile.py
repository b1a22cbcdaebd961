"""Describes a link by a `LinkProfile`, and has presets for common links.

A profile describes one direction: how long a byte takes to arrive (`latency`, `jitter`), how fast bytes leave
(`bytes_per_second`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction of a link. Seconds and bytes. Raises ValueError out of range."""

    latency: float = 0.0  # from the last byte's leaving to its arrival
    jitter: float = 0.0  # at most this much more, uniformly; order is kept, so a late frame holds up the next
    bytes_per_second: float | None = None  # None: no limit
    seed: int = 0  # of the jitter

    def __post_init__(self) -> None:
        for name in ("latency", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be seconds from 0, not {getattr(self, name)}")
        if self.bytes_per_second is not None and not 0 < self.bytes_per_second < math.inf:
            raise ValueError(f"bytes_per_second must be above 0, not {self.bytes_per_second}")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that sending a byte takes; 0 where there is no limit."""
        return 0.0 if self.bytes_per_second is None else 1 / self.bytes_per_second


# "Published" figures are from threads of exo, MLX and thunderbolt-ibverbs. Bandwidths are of the payload, without the
# headers of Ethernet, IP and TCP.
PRESETS: dict[str, LinkProfile] = {
    # Published: a hop through JACCL takes 10-20 us (bare verbs: 4.2). Verbs carry 4.75 GB/s in 4 KiB and 9.4 GB/s in
    # 64 KiB messages, mx.distributed 3.5-3.8 GB/s with its two copies; 6 is in the middle of what a good one would do.
    "thunderbolt-rdma": LinkProfile(latency=15e-6, bytes_per_second=6e9),
    # Published: ping 0.38-0.95 ms for a round trip, 0.67 between two machines; taken as 0.3 ms a hop. rsync reached
    # 0.3-0.5 GB/s, which is ssh's speed; iperf3 16.4 Gbit/s on a 20 Gbit/s USB4 cable (jiribrejcha.net, 2024).
    # There was no TCP figure for Thunderbolt 5; it may well be above this.
    "thunderbolt-ip": LinkProfile(latency=0.3e-3, bytes_per_second=2e9),
    # 1.25 GB/s less Ethernet, IP and TCP headers (1448 of 1538 bytes) is 1.18; the rest is what one stream loses in
    # practice. 0.1 ms a hop: a switch and two network stacks with interrupt moderation; assumed.
    "10gbe": LinkProfile(latency=0.1e-3, bytes_per_second=1.1e9),
    # 125 MB/s x 1448/1538 = 117.7. A ping of 0.4 ms through a home switch, energy-saving Ethernet on; assumed.
    "1gbe": LinkProfile(latency=0.2e-3, bytes_per_second=117e6),
    # Published: 4.9-54 ms for a round trip between Macs of one cluster; 3 ms plus up to 5 gives 6-16, its better end.
    # 50 MB/s: 802.11ac, two streams, same room; assumed. Real air is used by one direction at a time, this by two.
    "wifi": LinkProfile(latency=3e-3, jitter=5e-3, bytes_per_second=50e6),
}


_MILLISECONDS = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)ms")


def preset(profile: LinkProfile | str) -> LinkProfile:
    """A profile itself, the preset of that name, or, for a name such as 3ms, a fast link with that one-way latency.

    Raises ValueError listing the names.
    """
    if isinstance(profile, LinkProfile):
        return profile
    if latency := _MILLISECONDS.fullmatch(profile):
        return replace(PRESETS["10gbe"], latency=float(latency[1]) / 1000)
    if profile not in PRESETS:
        raise ValueError(f"no link preset {profile!r}; known: {', '.join(PRESETS)}")
    return PRESETS[profile]
