"""Tries, when a stage is loaded, how its states can be rolled back within a block of drafts (``rollback``).

A few tokens are computed without drafts, and once more with a block of which two rows are right and two are rolled
back. As in ``kv_trial``, each layer of the second run is given what it was given in the first, so what differs
differs by what one layer rounds.
"""

import logging
from functools import cache

import mlx.core as mx

from splitinfer.models.caches import trim
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_trial import ENDS, TAIL, WITHIN, Continued, inputs
from splitinfer.models.layer_trace import RowErrors, following, joined, rows_of
from splitinfer.models.layers import type_name
from splitinfer.models.rollback import Block, Rollback
from splitinfer.models.rounding import Errors, reason_to_refuse
from splitinfer.models.rows import Part
from splitinfer.models.step import StepModel

log = logging.getLogger(__name__)

_SALTS = 3  # kinds of made-up tokens in a round


def try_rollback(stage: StageModel, step: StepModel) -> Rollback | None:
    """The best way to roll a stage's states back; ``None`` if there is none. The best one where it has no states."""
    _ = step.cache_consumers  # found by a call, which must not be one of those that are compared
    for way in Rollback:
        reason = _why_not(stage, step, way)
        if reason is None:
            return way
        step.refusals.append(reason)
        log.debug("%s cannot roll back by %s: %s", type_name(stage.whole), way.value, reason)
    return None


def _why_not(stage: StageModel, step: StepModel, way: Rollback) -> str | None:
    at = cache(lambda number: _RolledBack(stage, step, way, _SALTS * number))
    try:
        return reason_to_refuse(lambda number: at(number).errors(), lambda number: at(number).noise())
    except _NoStates:
        return None
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything when it is run in parts
        return f"{type(error).__name__}: {error}"


class _NoStates(Exception):
    """All caches can be cut."""


class _RolledBack(Continued):
    """A sequence of ``WITHIN`` tokens that continues, once behind a block of drafts that was rolled back."""

    def __init__(self, stage: StageModel, step: StepModel, way: Rollback, salt: int) -> None:
        super().__init__(stage, WITHIN, salt)
        self._step, self._way = step, way

    def errors(self) -> Errors:
        """Of continuing behind the block, against continuing without it."""
        caches, start, end = self._stage.make_caches(), ENDS[0], ENDS[1]
        self._fill(caches, 0, start)
        block = Block.of(caches, self._way)
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

    def _run(self, caches: SequenceCaches, block: Block) -> list[mx.array]:
        """Run the block: its first rows are those of the reference."""
        start, end = ENDS[0], ENDS[1]
        ids, hidden = inputs(self._stage, start, WITHIN, self._salt)
        more_ids, more_hidden = inputs(self._stage, WITHIN, end, self._salt + 2)
        ids = mx.concatenate([ids, more_ids], axis=1)
        if hidden is not None and more_hidden is not None:
            hidden = mx.repeat(mx.concatenate([hidden, more_hidden], axis=1)[0], self._stage.rows_in, axis=0)
        return self._step.run([Part(caches, start, end - start, 1, block)], ids[0], hidden)
