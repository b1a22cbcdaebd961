"""Masks on their way to the last stage: each as the difference to one that the stage has.

A mask has a bit for each token: 19 KB for 152,000. Most are nearly alike: inside a string nearly everything may come,
elsewhere nearly nothing. So both sides keep the last masks in numbered *slots*, and a mask goes as the slot that it is
nearest to, the slot that it is kept in, and what differs, packed by zlib; a mask that the stage has goes as its slot.

Both sides change their slots by the same masks in the same order: that in which steps are sent, which is the order in
which they arrive. So the sender makes differences as late as it sends, and a stage reads all masks of a step, also
those of slices that it leaves out. Both begin again, with nothing, when the pipeline is opened.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitinfer.core.plan import RowMask
from splitinfer.errors import ProtocolError

NUM_SLOTS = 64
_NEAR = 16  # slots that are compared with: those used last
_LEVEL = 1  # of zlib

Words = NDArray[np.uint32]


class Masked(NamedTuple):
    """The mask of one row with logits of a sequence's slice, counted from the first of them: a bit for each token."""

    seq_id: int
    row: int
    mask: bytes


class MaskSender:
    """Makes differences. Call ``encode`` in the order in which steps are sent."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # of masks that the stage has, the last used last
        self._words: Words | None = None  # [slots, words]

    def encode(self, masks: Iterable[Masked]) -> tuple[RowMask, ...]:
        return tuple(self._encoded(one) for one in masks)

    def _encoded(self, one: Masked) -> RowMask:
        slot = self._slots.get(one.mask)
        if slot is not None:
            self._slots.move_to_end(one.mask)
            return RowMask(one.seq_id, one.row, slot, slot)
        words = np.frombuffer(one.mask, np.uint32)
        if self._words is None:
            self._words = np.zeros((NUM_SLOTS, words.size), np.uint32)
        base = self._nearest(words)
        difference = words ^ self._words[base] if base >= 0 else words
        slot = len(self._slots) if len(self._slots) < NUM_SLOTS else self._slots.popitem(last=False)[1]
        self._slots[one.mask] = slot
        self._words[slot] = words
        return RowMask(one.seq_id, one.row, slot, base, zlib.compress(difference.tobytes(), _LEVEL))

    def _nearest(self, words: Words) -> int:
        """The slot whose mask differs in the fewest words, of those used last; -1: there is none."""
        if not self._slots:
            return -1
        assert self._words is not None
        slots = np.array(list(self._slots.values())[-_NEAR:])
        return int(slots[np.count_nonzero(self._words[slots] != words, axis=1).argmin()])


class MaskReceiver:
    """Reads differences, in the order in which they were made. ``vocab_size``: tokens that may be sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._size = -(-vocab_size // 32)
        self._slots: dict[int, Words] = {}

    def clear(self) -> None:
        self._slots.clear()

    def decode(self, masks: Iterable[RowMask]) -> dict[tuple[int, int], tuple[int, Words]]:
        """For each sequence and row, the slot of its mask, and the mask: uint32 words, the lowest bit first.

        Raises:
            ProtocolError: a difference cannot be read, or is to a mask that is not here.
        """
        return {(one.seq_id, one.row): (one.slot, self._decoded(one)) for one in masks}

    def _decoded(self, one: RowMask) -> Words:
        base = np.zeros(self._size, np.uint32) if one.base < 0 else self._slots.get(one.base)
        if base is None or not 0 <= one.slot < NUM_SLOTS:
            raise ProtocolError(f"a mask differs from that in slot {one.base}, which is empty")
        if one.difference:
            base = base ^ self._unpacked(one.difference)
        self._slots[one.slot] = base
        return base

    def _unpacked(self, difference: bytes) -> Words:
        size = 4 * self._size
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(difference, size + 1)
        except zlib.error as error:
            raise ProtocolError(f"a mask cannot be read ({error})") from error
        if len(raw) != size:
            raise ProtocolError(f"a mask has {len(raw):,} bytes, not {size:,}")
        return np.frombuffer(raw, np.uint32)
