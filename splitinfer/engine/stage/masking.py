"""Masks on the last stage: a token that a mask excludes has no probability, with any filters.

Masks change the logits, after biases and penalties. So log probabilities count only the tokens that may be chosen.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from splitinfer.core.plan import Slice
from splitinfer.core.sampling_params import REPETITION_CONTEXT, SamplingParams
from splitinfer.engine.stage.history import Row
from splitinfer.errors import ProtocolError
from splitinfer.models.library.mlx_lm import sample_utils

RawMasks = Mapping[tuple[int, int], bytes | memoryview]
"""By sequence and row with logits: one bit for each token, the lowest first, in whole words of 32 bits."""

RowMasks = dict[tuple[int, int], mx.array]
"""By sequence and row with logits: bool [vocabulary], the tokens that may be chosen."""

Masks = Callable[[], RowMasks]
"""Returns the masks of a step, maybe after waiting for them."""


def masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Return [n, vocabulary] logits that are minus infinity for the tokens that each row's mask excludes, and for the
    padding of a vocabulary."""
    width = logits.shape[-1]
    masks = [_fitted(row.mask, width) for row in rows if row.mask is not None]
    return mx.where(mx.stack(masks), logits, -mx.inf)


def _fitted(allowed: mx.array, width: int) -> mx.array:
    return allowed[:width] if width <= allowed.size else mx.pad(allowed, (0, width - allowed.size))


def mask_of(raw: bytes | memoryview, vocab_size: int) -> mx.array:
    """Return bool [vocabulary], the mask in some bytes."""
    return mx.array(np.unpackbits(np.frombuffer(raw, np.uint8), count=vocab_size, bitorder="little").view(np.bool_))


def read_masks(masks: RawMasks, vocab_size: int) -> RowMasks:
    """Return the masks of a step's rows.

    Raises:
        ProtocolError: a mask does not have ``vocab_size`` tokens.
    """
    size = 4 * -(-vocab_size // 32)
    wrong = next((len(raw) for raw in masks.values() if len(raw) != size), size)
    if wrong != size:
        raise ProtocolError(f"a mask has {wrong:,} bytes; for {vocab_size:,} tokens it has {size:,}")
    return {place: mask_of(raw, vocab_size) for place, raw in masks.items()}


def with_masks(slices: Sequence[Slice], rows: Sequence[Row], masks: RowMasks) -> tuple[Row, ...]:
    """Return the slices' rows with logits, each with its mask."""
    places = [(part.seq_id, row) for part in slices for row in range(part.num_logits)]
    return tuple(replace(row, mask=masks.get(place)) for row, place in zip(rows, places, strict=True))


# -- biases and penalties --------------------------------------------------------------------------


def adjusted(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Return [n, vocabulary] logits with each row's bias and penalties, not evaluated."""
    logits = _added(logits, [dict(row.params.logit_bias) for row in rows])
    if any(row.params.repetition_penalty != 1.0 for row in rows):
        logits = _with_repetition_penalty(logits, rows)
    return _added(logits, [answer_penalty(row.params, row.answer) for row in rows])


def answer_penalty(params: SamplingParams, answer: Sequence[int]) -> dict[int, float]:
    """Return, by token of an answer, the number that the presence and frequency penalties add to its logit.

    >>> answer_penalty(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), (7, 9, 7))
    {7: -1.0, 9: -0.75}
    """
    if not params.has_answer_penalty:
        return {}
    counts = Counter(answer)
    return {token: -params.presence_penalty - params.frequency_penalty * n for token, n in counts.items()}


def _added(logits: mx.array, additions: Sequence[Mapping[int, float]]) -> mx.array:
    """Return the logits plus each row's numbers by token, in one operation for all rows."""
    entries = [
        (row, token, number)
        for row, addition in enumerate(additions)
        for token, number in addition.items()
        if 0 <= token < logits.shape[-1]
    ]
    if not entries:
        return logits
    rows, tokens, numbers = zip(*entries, strict=True)
    return logits.at[mx.array(rows), mx.array(tokens)].add(mx.array(numbers, dtype=logits.dtype))


def _with_repetition_penalty(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Apply mlx-lm's repetition penalty row by row, because each row has its own recent tokens."""
    lines = []
    for i, row in enumerate(rows):
        penalty = sample_utils.make_repetition_penalty(row.params.repetition_penalty, REPETITION_CONTEXT)
        recent = [token for token in row.recent if 0 <= token < logits.shape[-1]]
        lines.append(penalty(mx.array(recent), logits[i : i + 1]))
    return mx.concatenate(lines) if len(lines) > 1 else lines[0]
