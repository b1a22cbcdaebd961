"""Masks on the last stage: tokens that may not be chosen have no probability, whatever the filters are.

They act behind biases and penalties, on the logits, so log probabilities are those of the tokens that may be chosen.
Where a mask leaves one token, which is so of all that a grammar forces, that is looked up once, when the mask is read:
such a row needs no logits (``models.rows.Part.known``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from splitinfer.core.plan import RowMask, Slice
from splitinfer.engine.stage.row import Mask, Row
from splitinfer.grammar.masks import MaskReceiver

RowMasks = dict[tuple[int, int], Mask]
"""By sequence and row with logits."""

Masks = Callable[[], RowMasks]
"""Those of a step, which may have to be waited for."""


def masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """[n, vocabulary] logits, without those of tokens that the rows' masks leave out. A padded vocabulary's are left
    out, too."""
    width = logits.shape[-1]
    masks = [_fitted(row.mask.allowed, width) for row in rows if row.mask is not None]
    return mx.where(mx.stack(masks), logits, -mx.inf)


def _fitted(allowed: mx.array, width: int) -> mx.array:
    return allowed[:width] if width <= allowed.size else mx.pad(allowed, (0, width - allowed.size))


def _of_words(words: NDArray[np.uint32], vocab_size: int) -> Mask:
    allowed = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    return Mask(mx.array(allowed), int(allowed.argmax()) if np.count_nonzero(allowed) == 1 else None)


def mask_of(raw: bytes, vocab_size: int) -> Mask:
    """A mask of its bytes."""
    return _of_words(np.frombuffer(raw, np.uint32), vocab_size)


def with_masks(slices: Sequence[Slice], rows: Sequence[Row], masks: RowMasks) -> tuple[Row, ...]:
    """The rows with logits of some slices, with their masks."""
    places = [(part.seq_id, row) for part in slices for row in range(part.num_logits)]
    return tuple(replace(row, mask=masks.get(place)) for row, place in zip(rows, places, strict=True))


def known_rows(part: Slice, rows: Sequence[Row], masks: Masks) -> set[int]:
    """Those of a slice's tokens behind which only one may come, by number: they want no logits."""
    first = len(part.token_ids) - part.num_logits
    return {first + i for i, row in enumerate(with_masks((part,), rows, masks())) if row.only is not None}


class StageMasks:
    """The masks that the last stage has, as differences come in; each is unpacked once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._receiver = MaskReceiver(vocab_size)
        self._masks: dict[int, tuple[NDArray[np.uint32], Mask]] = {}  # by slot

    def clear(self) -> None:
        """Begin again."""
        self._receiver.clear()
        self._masks.clear()

    def blank(self) -> Mask:
        """A mask to be filled."""
        return Mask(mx.array(np.zeros(self._vocab_size, np.bool_)))

    def read(self, masks: Iterable[RowMask]) -> RowMasks:
        """The masks of a step's rows.

        Raises:
            ProtocolError: one cannot be read.
        """
        return {place: self._mask(*found) for place, found in self._receiver.decode(masks).items()}

    def _mask(self, slot: int, words: NDArray[np.uint32]) -> Mask:
        kept = self._masks.get(slot)
        if kept is None or kept[0] is not words:
            kept = self._masks[slot] = words, _of_words(words, self._vocab_size)
        return kept[1]
