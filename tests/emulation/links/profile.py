"""Describes a link by a `LinkProfile`.

A profile describes one direction: how long a byte takes to arrive (`latency`, `jitter`), how fast bytes leave
(`bytes_per_second`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
