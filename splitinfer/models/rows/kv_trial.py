"""Tries, when a stage is loaded, whether a sequence can start from stored KV blocks, and how its states roll back.

A cache of an unknown kind may hold more than its arrays show. So a few tokens are computed twice: without blocks, and
from blocks, after the sequence that they were cut from has continued with other tokens. Blocks are stored only if both
results agree up to rounding (``rounding``). Every sequence computes its tokens in the same chunks, and each layer gets
the inputs that it got in the first run: so keys and values differ by one layer's rounding only.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import cast

import mlx.core as mx

from splitinfer.core.kv.format import KVFormat
from splitinfer.core.kv.rewind import UNLIMITED, WITHIN_DRAFTS, least_rewind
from splitinfer.models.caches.caches import rewind_limit, trim
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.kv_blocks import KVBlock, cut, join
from splitinfer.models.caches.rollback import DraftedBlock, Rollback
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.layers import type_name
from splitinfer.models.rows.rounding import (
    Errors,
    LayerCall,
    RowErrors,
    following,
    joined,
    reason_to_refuse,
    recording,
    rows_of,
)
from splitinfer.models.rows.step import StepModel, with_taps

ENDS = (5, 9)  # the ends of two blocks, in tokens
WITHIN = 7  # tokens to start from that end within the second block
_CHUNK = 64  # tokens of a sample, which no model takes for a few decoded ones
TAIL = 3  # tokens after the blocks
log = logging.getLogger(__name__)

_SALTS = 3  # kinds of made-up tokens: in the blocks, in the source after them, in the sequence that starts there


def why_no_blocks(stage: StageModel) -> str | None:
    """Return why this stage's KV cannot be stored in blocks, or None if it can. Stores blocks of a few made-up tokens
    and continues from them: at a block's end and, if possible, within one."""
    try:
        limit = least_rewind(rewind_limit(cache) for cache in stage.make_caches().own)
        for length in (ENDS[1], WITHIN) if limit is UNLIMITED or limit > WITHIN_DRAFTS else (ENDS[1],):
            reason = _reason(partial(Continued, stage, length))
            if reason is not None:
                return f"continuing from {length} stored tokens: {reason}"
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything when given unknown caches
        return f"{type(error).__name__}: {error}"
    return None


def sample_blocks(stage: StageModel) -> list[KVBlock]:
    """Return two blocks with the form of this stage's and its heads' KV: of a long chunk, and of a token more, so that
    caches lag that may. Their arrays are never evaluated."""
    found = []
    for parts in ([_CHUNK], [_CHUNK, 1]):
        caches, end = stage.make_caches(), 0
        for count in parts:
            _build(stage, caches, end, end + count, 0, 1)
            end += count
        if stage.heads is not None:
            stage.heads.run_nothing(caches, end)
        found.append(cut(caches, stage.kv_places, 0, end))
    return found


def off_by(stage: StageModel, kv_format: KVFormat) -> float:
    """Return the relative error of a few made-up tokens' outputs with KV in ``kv_format``, compared with exact KV. The
    stage uses the format afterwards."""
    outputs = []
    for one in (None, kv_format):
        stage.use_format(one)
        caches = stage.make_caches()
        steps = ((0, ENDS[1]), (ENDS[1], ENDS[1] + 1))  # many rows, then one: a GPU has a kernel for each
        rows = [_run(stage, caches, start, end, salt=0).astype(mx.float32) for start, end in steps]
        outputs.append(rows)
    pairs = zip(*outputs, strict=True)
    errors = [mx.linalg.norm(rounded - exact) / (mx.linalg.norm(exact) + 1e-9) for exact, rounded in pairs]
    return cast(float, mx.stack(errors).max().item())


class Continued:
    """A sequence of ``length`` tokens that continues with the tokens of round ``number``, with and without blocks."""

    def __init__(self, stage: StageModel, length: int, number: int) -> None:
        self._stage, self._length, self._salt = stage, length, _SALTS * number
        self._chunks: dict[int, list[LayerCall]] = {}

    def errors(self) -> Errors:
        """Return the errors of continuing from blocks, compared with continuing without."""
        return self._errors(self._from_blocks(), [TAIL])

    def noise(self) -> Errors:
        """Return the errors of continuing without blocks one token at a time, compared with all at once."""
        return self._errors(self._without_blocks(), [1] * TAIL)

    def _errors(self, caches: SequenceCaches, counts: Sequence[int]) -> Errors:
        calls, wanted = self._reference
        errors, outputs, at = RowErrors(), list[mx.array](), 0
        for count in counts:
            with following(self._stage, count, partial(rows_of, calls, at, at + count), errors):
                start = self._length + at
                outputs.append(_build(self._stage, caches, start, start + count, self._salt + 2, count)[0])
            at += count
        errors.add_outputs(mx.concatenate(outputs), wanted)
        return errors.evaluated()

    @cached_property
    def _reference(self) -> tuple[list[LayerCall], mx.array]:
        """The layers' calls without blocks, and the output rows."""
        caches, end = self._without_blocks(), self._length + TAIL
        with recording(self._stage, TAIL) as calls:
            output = _build(self._stage, caches, self._length, end, self._salt + 2, TAIL)[0]
        mx.eval(output, [call.returned for call in calls])
        return calls, output

    def _from_blocks(self) -> SequenceCaches:
        source, places, blocks = self._stage.make_caches(), self._stage.own_places, list[KVBlock]()
        for start, end in zip((0, *ENDS), ENDS, strict=False):
            self._fill(source, start, end)
            blocks.append(cut(source, places, start, end))
        # The source continues: the trial fails if a block shares memory with it.
        _run(self._stage, source, ENDS[1], ENDS[1] + TAIL, self._salt + 1)
        joined = self._stage.make_caches()
        join(joined, places, blocks, self._length)
        return joined

    def _without_blocks(self) -> SequenceCaches:
        caches = self._stage.make_caches()
        self._fill(caches, 0, self._length)
        return caches

    def _fill(self, caches: SequenceCaches, start: int, end: int) -> None:
        """Run positions [start, end) in chunks."""
        ends = [each for each in (ENDS[0], WITHIN, ENDS[1]) if start < each <= end]
        for first, last in zip((start, *ends), ends, strict=False):
            with self._as_before(first, last - first):
                _run(self._stage, caches, first, last, self._salt)

    @contextmanager
    def _as_before(self, start: int, count: int) -> Iterator[None]:
        """Record the layers' calls in the chunk from ``start``; the next time, give the layers the recorded inputs."""
        if start in self._chunks:
            with following(self._stage, count, lambda: self._chunks[start], RowErrors()):
                yield
        else:
            with recording(self._stage, count) as calls:
                yield
            mx.eval([call.returned for call in calls])
            self._chunks[start] = calls


def _reason(of_round: Callable[[int], Continued]) -> str | None:
    """Return why the results of a trial are wrong. Return None if they are right up to rounding."""
    at = cache(of_round)
    return reason_to_refuse(lambda number: at(number).errors(), lambda number: at(number).noise())


def _run(stage: StageModel, caches: SequenceCaches, start: int, end: int, salt: int) -> mx.array:
    """Return the stage's evaluated output for positions [start, end) of a made-up sequence (last stage: one row)."""
    y = _build(stage, caches, start, end, salt, 1)
    mx.eval(y, caches.arrays())
    return y


def _build(stage: StageModel, caches: SequenceCaches, start: int, end: int, salt: int, num_logits: int) -> mx.array:
    """Return the stage's output, not evaluated, for ``num_logits`` rows on the last stage."""
    ids, hidden = inputs(stage, start, end, salt)
    return stage(ids, caches, hidden, num_logits)


def inputs(stage: StageModel, start: int, end: int, salt: int) -> tuple[mx.array, mx.array | None]:
    """Return [1, n] token ids and [1, n, d] hidden states of positions [start, end) of a made-up sequence."""
    ids = mx.array([[(7 * i + salt) % 32 for i in range(start, end)]], dtype=mx.int32)
    noise = stage.made_up_hidden(max(end, ENDS[1] + TAIL), salt)
    return ids, None if noise is None else noise[None, start:end]


# -- rollback --------------------------------------------------------------------------------------
#
# A few tokens are computed twice: without drafts, and after a block with two right rows and two that are rolled back.


def try_rollback(stage: StageModel, step: StepModel) -> Rollback | None:
    """Return the first working way to roll a stage's states back, or ``None`` if none works."""
    _ = step.cache_consumers  # a call finds them, and it must not be a call that is compared
    for way in Rollback:
        reason = _why_not(stage, step, way)
        if reason is None:
            return way
        step.refusals.append(reason)
        log.debug("%s cannot roll back by %s: %s", type_name(stage.whole), way.value, reason)
    return None


def _why_not(stage: StageModel, step: StepModel, way: Rollback) -> str | None:
    try:
        return _reason(partial(_RolledBack, stage, step, way))
    except _NoStates:
        return None
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything when it is run in parts
        return f"{type(error).__name__}: {error}"


class _NoStates(Exception):
    """The sequence has no states: all its caches can be cut."""


class _RolledBack(Continued):
    """A sequence of ``WITHIN`` tokens that continues, with and without a block of drafts that was rolled back."""

    def __init__(self, stage: StageModel, step: StepModel, way: Rollback, number: int) -> None:
        super().__init__(stage, WITHIN, number)
        self._step, self._way = step, way

    def errors(self) -> Errors:
        """Return the errors of continuing after the block, compared with continuing without it."""
        caches, start, end = self._stage.make_caches(), ENDS[0], ENDS[1]
        self._fill(caches, 0, start)
        block = DraftedBlock.of(caches, self._way)
        if block is None:
            raise _NoStates
        calls, _ = self._reference
        right, wrong = self._chunks[start], rows_of(calls, 0, end - WITHIN)
        with following(self._stage, end - start, lambda: joined([right, wrong]), RowErrors()):
            mx.eval(self._run(caches, block), block.arrays(), caches.arrays())
        resumed = block.resumes_at(WITHIN)
        assert all(trim(cache, end - resumed) for cache in caches.own), "its other caches cannot be cut"
        caches.place.position = resumed
        with following(self._stage, WITHIN - start, lambda: right, RowErrors()):
            block.restore(self._stage, caches, WITHIN - start)
        caches.place.position = WITHIN
        mx.eval(caches.arrays())
        return self._errors(caches, [TAIL])

    def _run(self, caches: SequenceCaches, block: DraftedBlock) -> list[mx.array]:
        """Run the block. Its first rows equal the reference's."""
        start, end = ENDS[0], ENDS[1]
        ids, hidden = inputs(self._stage, start, WITHIN, self._salt)
        more_ids, more_hidden = inputs(self._stage, WITHIN, end, self._salt + 2)
        ids = mx.concatenate([ids, more_ids], axis=1)
        if hidden is not None and more_hidden is not None:
            hidden = mx.concatenate([hidden, more_hidden], axis=1)[0]
            if size := self._stage.tap_size * (self._stage.rows_in > 1):
                hidden = with_taps(hidden, mx.zeros((len(hidden), size)), size)
        return self._step.run([SequenceRows(caches, start, end - start, 1, block)], ids[0], hidden)
