"""Tries, when a stage is loaded, whether a sequence can start from stored KV blocks.

A cache of an unknown kind may hold more than its arrays show. So a few tokens are computed without blocks, and once
more from blocks, after the sequence that they were cut from has continued with other tokens. Blocks are stored only
where both agree. An architecture that fails is at worst slow.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from splitinfer.core.kv.format import KVFormat
from splitinfer.core.kv.rewind import PUT_BACK, UNLIMITED, least_rewind
from splitinfer.models.caches import arrays_of, rewind_limit
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_blocks import KVBlock, cut, join

_ENDS = (5, 9)  # of two blocks
_TAIL = 3  # tokens after them
_TOLERANCE = {mx.float32: 1e-3}  # relative error that may be rounding
_TOLERANCE_HALF = 0.02


@dataclass(frozen=True, slots=True)
class Trial:
    """``why_not``: why this stage's KV cannot be stored in blocks; ``None`` if it can, and ``sample`` is a block."""

    why_not: str | None = None
    sample: KVBlock | None = None


def try_blocks(stage: StageModel) -> Trial:
    """Store blocks of a few made-up tokens and continue from them: at a block's end and, if possible, within one."""
    sample = None
    try:
        for length in (_ENDS[1], *((_ENDS[0] + 2,) if _can_cut_anywhere(stage) else ())):
            sample, error = _error_after(stage, length)
            if not error <= 1:
                return Trial(f"continuing from {length} tokens differs by {error:.3g} times what may be rounding")
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything when given unknown caches
        return Trial(f"{type(error).__name__}: {error}")
    return Trial(sample=sample)


def off_by(stage: StageModel, kv_format: KVFormat) -> float:
    """The relative error of a few made-up tokens' outputs with KV of a format, against exact KV. The stage uses the
    format afterwards."""
    outputs = []
    for one in (None, kv_format):
        stage.use_format(one)
        outputs.append(_run(stage, stage.make_caches(), 0, _ENDS[1], salt=0).astype(mx.float32))
    exact, rounded = outputs
    return cast(float, (mx.linalg.norm(rounded - exact) / (mx.linalg.norm(exact) + 1e-9)).item())


def _can_cut_anywhere(stage: StageModel) -> bool:
    limit = least_rewind(rewind_limit(cache) for cache in stage.make_caches().own)
    return limit is UNLIMITED or limit > PUT_BACK


def _error_after(stage: StageModel, length: int) -> tuple[KVBlock, float]:
    """A block; and the error, in units of the tolerance, of continuing from ``length`` stored tokens."""
    source, blocks, places = stage.make_caches(), [], stage.own_places
    for start, end in zip((0, *_ENDS), _ENDS, strict=False):
        _run(stage, source, start, end, salt=0)
        blocks.append(cut(source, places, start, end))
    _run(stage, source, _ENDS[1], _ENDS[1] + _TAIL, salt=7)  # would show if a block shared memory with the sequence
    joined = stage.make_caches()
    join(joined, places, blocks, length)
    reference = stage.make_caches()
    for start, end in zip((0, *_ENDS), (_ENDS[0], length), strict=False):
        _run(stage, reference, start, end, salt=0)
    a, b = (_run(stage, caches, length, length + _TAIL, salt=3) for caches in (joined, reference))
    tolerance = _TOLERANCE.get(a.dtype, _TOLERANCE_HALF)
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return blocks[-1], cast(float, (mx.linalg.norm(a - b) / (mx.linalg.norm(b) + 1e-9) / tolerance).item())


def _run(stage: StageModel, caches: SequenceCaches, start: int, end: int, salt: int) -> mx.array:
    """The stage's evaluated output for positions [start, end) of a made-up sequence."""
    ids = mx.array([[(7 * i + salt) % 32 for i in range(start, end)]], dtype=mx.int32)
    width, hidden = stage.hidden_spec, None
    if width is not None:
        noise = mx.random.normal((1, _ENDS[1] + _TAIL, width[0]), key=mx.random.key(salt))
        hidden = noise[:, start:end].astype(width[1])
    y = stage(ids, caches, hidden, 1)
    mx.eval(y, [array for cache in caches.own for array in arrays_of(cache)])
    return y
