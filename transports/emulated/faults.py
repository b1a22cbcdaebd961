"""Injects faults: decides, frame by frame, what is sent in its place.

Only DATA packets have faults, on the side that sends. They are drawn from a generator with the profile's seed, so the
same seed gives faults to the same frames. Each frame has one fault at most, tried in the order of `PACKET_FAULTS`; a
cut is tried before them and ends the link. A frame that is dropped, or held back to follow the next one, leaves a gap:
its time on the wire passes all the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transports.base import Frame
from transports.emulated.profile import PACKET_FAULTS, LinkProfile
from transports.framing import as_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """In place of a frame: the connection is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gap:
    """In place of a frame: its time on the wire passes, and nothing arrives."""


class FaultInjector:
    """Decides frame by frame what goes wrong; deterministic for a profile, which includes the seed."""

    def __init__(self, profile: LinkProfile) -> None:
        self._profile = profile
        self._rng = random.Random(profile.seed)
        self._num_seen = 0
        self._held: Frame | None = None
        self._is_cut = False

    def apply(self, packet: Frame) -> list[Frame | Cut | Gap]:
        """The items that go on the wire in place of this DATA packet."""
        if self._is_cut:
            return []
        if self._profile.cut_after_frames == self._num_seen or self._strikes("cut"):
            self._is_cut = True
            return [Cut(f"the emulated link was cut after {self._num_seen} frames")]
        self._num_seen += 1
        fault = next((name for name in PACKET_FAULTS if self._strikes(name)), None)
        if fault == "drop":
            return [Gap()]
        if fault == "reorder" and self._held is None:
            self._held = packet
            return [Gap()]
        if fault == "corrupt":
            packet = self._flip_a_bit(packet)
        return [packet, *([packet] if fault == "duplicate" else []), *self.held_back()]

    def held_back(self) -> list[Frame]:
        """The packet that was held back to follow the next one, if any."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _strikes(self, name: str) -> bool:
        return bool(self._rng.random() < getattr(self._profile, name))

    def _flip_a_bit(self, packet: Frame) -> Frame:
        """A damaged copy; the sender's buffers must not be changed."""
        buffers = [memoryview(packet.header), *map(as_bytes, packet.parts)]
        bit = self._rng.randrange(8 * sum(buffer.nbytes for buffer in buffers))
        for index, buffer in enumerate(buffers):
            if bit < 8 * buffer.nbytes:
                damaged = bytearray(buffer)
                damaged[bit // 8] ^= 1 << bit % 8
                header = bytes(damaged) if index == 0 else packet.header
                parts = tuple(damaged if at == index else part for at, part in enumerate(buffers[1:], 1))
                return Frame(header, parts)
            bit -= 8 * buffer.nbytes
        raise AssertionError("a packet has at least a prelude")
