"""Masks on the last stage: tokens that may not be chosen have no probability, whatever the filters are.

They act behind biases and penalties, on the logits, so log probabilities are those of the tokens that may be chosen.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from splitinfer.core.plan import RowMask, Slice
from splitinfer.engine.stage.row import Row
from splitinfer.grammar.masks import MaskReceiver

RowMasks = dict[tuple[int, int], mx.array]
"""By sequence and row with logits: bool [vocabulary]."""

Masks = Callable[[], RowMasks]
"""Those of a step, which may have to be waited for."""


def masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """[n, vocabulary] logits, without those of tokens that the rows' masks leave out. A padded vocabulary's are left
    out, too."""
    width = logits.shape[-1]
    masks = [_fitted(row.mask, width) for row in rows if row.mask is not None]
    return mx.where(mx.stack(masks), logits, -mx.inf)


def _fitted(mask: mx.array, width: int) -> mx.array:
    return mask[:width] if width <= mask.size else mx.pad(mask, (0, width - mask.size))


def as_array(words: NDArray[np.uint32], vocab_size: int) -> mx.array:
    """A mask's words as bool [vocabulary]."""
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
    return mx.array(bits.view(np.bool_))


def mask_of(raw: bytes, vocab_size: int) -> mx.array:
    """A mask's bytes as bool [vocabulary]."""
    return as_array(np.frombuffer(raw, np.uint32), vocab_size)


def with_masks(slices: Sequence[Slice], rows: Sequence[Row], masks: RowMasks) -> tuple[Row, ...]:
    """The rows with logits of some slices, with their masks."""
    places = [(part.seq_id, row) for part in slices for row in range(part.num_logits)]
    return tuple(replace(row, mask=masks.get(place)) for row, place in zip(rows, places, strict=True))


class StageMasks:
    """The masks that the last stage has, as differences come in; each is unpacked once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._receiver = MaskReceiver(vocab_size)
        self._arrays: dict[int, tuple[NDArray[np.uint32], mx.array]] = {}  # by slot

    def clear(self) -> None:
        """Begin again."""
        self._receiver.clear()
        self._arrays.clear()

    def blank(self) -> mx.array:
        """A mask to be filled."""
        return mx.array(np.zeros(self._vocab_size, np.bool_))

    def read(self, masks: Iterable[RowMask]) -> RowMasks:
        """The masks of a step's rows.

        Raises:
            ProtocolError: one cannot be read.
        """
        return {place: self._array(*found) for place, found in self._receiver.decode(masks).items()}

    def _array(self, slot: int, words: NDArray[np.uint32]) -> mx.array:
        kept = self._arrays.get(slot)
        if kept is None or kept[0] is not words:
            kept = self._arrays[slot] = words, as_array(words, self._vocab_size)
        return kept[1]
