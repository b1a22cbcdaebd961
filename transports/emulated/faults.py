"""What goes wrong on the way: decides, frame by frame, what goes on the wire in its place.

Faults strike DATA only, on the side that sends. They are drawn from a generator of the profile's seed, so the same seed
strikes the same frames. Each frame meets with one fault at most, tried in the order of `PACKET_FAULTS`; a cut is tried
before them and is the last thing that happens. A frame that is dropped, or held back to follow the next one, leaves a
gap: its time on the wire passes all the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transports.base import Frame
from transports.emulated.profile import PACKET_FAULTS, LinkProfile
from transports.framing import as_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """In place of a frame: here the connection is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gap:
    """In place of a frame: its time on the wire, and nothing comes out."""


class FaultInjector:
    """Decides frame by frame what goes wrong. The same profile, seed included, does the same to the same frames."""

    def __init__(self, profile: LinkProfile) -> None:
        self._profile = profile
        self._chance = random.Random(profile.seed)
        self._num_seen = 0
        self._held: Frame | None = None
        self._is_cut = False

    def apply(self, packet: Frame) -> list[Frame | Cut | Gap]:
        """What goes on the wire in place of this DATA packet."""
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
        """What was held back to follow the next packet."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _strikes(self, name: str) -> bool:
        return bool(self._chance.random() < getattr(self._profile, name))

    def _flip_a_bit(self, packet: Frame) -> Frame:
        """A copy, since the sender's buffers are not ours to change."""
        buffers = [memoryview(packet.header), *map(as_bytes, packet.parts)]
        bit = self._chance.randrange(8 * sum(buffer.nbytes for buffer in buffers))
        for index, buffer in enumerate(buffers):
            if bit < 8 * buffer.nbytes:
                damaged = bytearray(buffer)
                damaged[bit // 8] ^= 1 << bit % 8
                header = bytes(damaged) if index == 0 else packet.header
                parts = tuple(damaged if at == index else part for at, part in enumerate(buffers[1:], 1))
                return Frame(header, parts)
            bit -= 8 * buffer.nbytes
        raise AssertionError("a packet has at least a prelude")
