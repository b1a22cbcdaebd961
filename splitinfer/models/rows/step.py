"""Runs one step of a stage: the rows of many sequences through its layers, in the best way that its model allows.

A trial (``step_trial``) finds the best correct way: it computes the same small steps in one way and sequence by
sequence, and accepts the way only if the results agree up to rounding. So an unknown architecture is at worst slow.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from splitinfer.models.blas import is_batch_invariant
from splitinfer.models.caches.caches import WindowKVCache, is_plain
from splitinfer.models.caches.cohort import Cohort, SequenceCaches, can_join, share_calls
from splitinfer.models.caches.growing import GrowingKVCache
from splitinfer.models.caches.quantised import QuantisedKVCache
from splitinfer.models.caches.rollback import DraftedBlock
from splitinfer.models.caches.rows import (
    CacheConsumer,
    RowCache,
    RowsCall,
    RowStep,
    SequenceRows,
    attend_by_rows,
    each_sequence,
    find_cache_consumers,
)
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.layers import LayerWatch, children_watched, type_name
from splitinfer.models.rows.step_trial import ALL_STEPS, TWO_STEPS, SmallSteps, trial_of

log = logging.getLogger(__name__)


class Way(StrEnum):
    """How the sequences of one step go through the layers, the best way first."""

    ROWS = "rows"  # together; only the attention itself sees sequences
    MIXED = "rows and modules"  # ROWS if a layer has keys and values, MODULES if it has another state
    MODULES = "modules"  # together, but every module that takes a cache is called for each sequence
    SEQUENCES = "sequences"  # one sequence after the other


class StepModel:
    """Runs steps of many sequences on a stage's layers.

    ``exact``: share an attention call only among sequences of equal length, so that no bit changes. Default: exact if
    this machine's arithmetic is batch invariant.
    """

    def __init__(self, model: StageModel, *, exact: bool | None = None) -> None:
        self.stage = model
        self._exact = is_batch_invariant() if exact is None else exact
        self._fresh = fresh = model.make_caches().full
        self._caches = [RowCache(i, cache) for i, cache in enumerate(fresh)]
        self._plain_places = [i for i in model.own_places if type(fresh[i]) in (GrowingKVCache, QuantisedKVCache)]
        self._places = self._plain_places
        self._each: list[tuple[Any, str, LayerWatch]] = []
        self.refusals: list[str] = []
        """The reasons why trials refused a way; an exception is given as "type: text"."""
        self.tapped: mx.array | None = None  # [T, d] of the last step, in the order of the plan, if layers are tapped

    @cached_property
    def way(self) -> Way:
        """The way to run rows of many sequences. The first access tries each way with small steps until one is
        right."""
        return self._first_way(self._trial(ALL_STEPS))

    def _trial(self, steps: SmallSteps) -> Callable[[], str | None]:
        """Return the trial of the current way: it returns why the way is wrong, or ``None`` if it is right."""
        trial = trial_of(self.stage, self._one_by_one, lambda: tuple(self._caches[0].step.parts), steps)
        return partial(trial, self._by_rows)

    def why_not_all(self, way: Way, *, shares_calls: bool) -> str | None:
        """Return why a way that is right for some layers is wrong for all. Return None if two steps show no error."""
        if way is Way.SEQUENCES:
            return None
        attend_by_rows(self.stage.whole)
        return self._try(self._trial(TWO_STEPS), way, self._plain_places if shares_calls else [])

    @property
    def shares_calls(self) -> bool:
        """Whether plain caches share attention calls in the current way."""
        return bool(self._places)

    def use(self, way: Way, *, shares_calls: bool) -> None:
        """Use a way that an earlier trial has found, without a trial."""
        if way is not Way.SEQUENCES:
            attend_by_rows(self.stage.whole)
            self._take(way, self._plain_places if shares_calls else [])
        self.way = way

    def choose_by_form(self) -> Way:
        """Choose and return the first way that can build the graph of a small step. Computes nothing. This is for
        stages that are only timed: a trial would take longer than the measurement."""
        self.way = self._first_way(self._why_not_its_form)
        return self.way

    def _first_way(self, why_wrong: Callable[[], str | None]) -> Way:
        """Return the first way that is not wrong. ``why_wrong``: returns why the current way is wrong, or ``None``."""
        if not self.stage.may_go_by_rows:
            return Way.SEQUENCES
        attend_by_rows(self.stage.whole)
        for way in (Way.ROWS, Way.MIXED, Way.MODULES):
            # Again without cohorts, which cannot apply a model's own mask over plain keys and values.
            reason = self._try(why_wrong, way, self._plain_places) and self._try(why_wrong, way, [])
            if reason is None:
                return way
            self.refusals.append(reason)
            log.debug("%s cannot run by %s: %s", type_name(self.stage.whole), way.value, reason)
        return Way.SEQUENCES

    def _try(self, why_wrong: Callable[[], str | None], way: Way, places: list[int]) -> str | None:
        """Switch to a way and return why it is wrong. Return None if it is right."""
        try:
            self._take(way, places)
            return why_wrong()
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything when given unknown caches
            return f"{type(error).__name__}: {error}"

    def _take(self, way: Way, places: list[int]) -> None:
        """Use a way from now on. ``places``: the places of plain caches, which may share attention calls."""
        consumers = [] if way is Way.ROWS else self.cache_consumers
        if way is Way.MIXED:
            with_kv = [is_plain(one) or isinstance(one, WindowKVCache) for one in self._fresh]
            consumers = [one for one in consumers if not with_kv[one.place]]
        self._places = [] if way is Way.MODULES else places  # in MODULES each module sees one sequence at a time
        self._each = [(one.holder, one.key, each_sequence) for one in consumers]

    def _why_not_its_form(self) -> str | None:
        """Return why the graphs of two steps have a wrong number of output rows. Return None if it is right."""
        caches = [self.stage.make_caches() for _ in range(2)]
        for rows in (2, 1), (1, 1):
            parts = [SequenceRows(own, own.place.position, n, 1) for own, n in zip(caches, rows, strict=True)]
            spec, total = self.stage.hidden_spec, sum(rows)
            hidden = None if spec is None else mx.zeros((total, spec[0]), spec[1])
            num_rows = sum(y.shape[0] for y in self._by_rows(parts, [0] * total, hidden))
            if num_rows != (len(parts) if self.stage.is_last else total):
                return f"a step of {total} rows has {num_rows} output rows"
        return None

    @cached_property
    def cache_consumers(self) -> list[CacheConsumer]:
        """The modules of this stage's layers that take caches. The first access builds the graph of a call."""
        caches = self.stage.make_caches()
        return find_cache_consumers(
            [self.stage.layer(i) for i in range(self.stage.start, self.stage.end)],
            caches.full,
            lambda: self.stage(mx.zeros((1, 2), mx.int32), caches, None, 1),
        )

    def run(
        self, parts: Sequence[SequenceRows], tokens: Sequence[int] | mx.array, hidden: mx.array | None
    ) -> list[mx.array]:
        """Build the graph of a step. Computes nothing yet, and advances each sequence by its rows.

        Args:
            parts: each sequence's share, in the order of the rows; at least one.
            tokens: T token ids, numbers or an int32 array.
            hidden: [T, d] from the previous stage; ``None`` on the first stage. If earlier layers are tapped, as
                ``with_taps`` makes it.

        Returns:
            Arrays whose concatenation is [T, d] for the next stage, with the taps if layers so far are tapped, or on
            the last stage the [R, vocabulary] logits of the rows that want them.
        """
        before = None
        if hidden is not None and self.stage.rows_in > 1:
            pieces, width = hidden.reshape(-1, self.stage.rows_in, hidden.shape[-1]), self.stage.hidden_spec
            assert width is not None
            hidden, before = pieces[:, :-1].reshape(len(pieces), -1)[:, : width[0]], pieces[:, -1]
        together = len(parts) > 1 and self.way is not Way.SEQUENCES
        outputs = (self._by_rows if together else self._one_by_one)(parts, tokens, hidden)
        if before is not None:
            self.tapped = before if self.tapped is None else _added(before, self.tapped)
        if self.stage.rows_out == 1:
            return outputs
        tapped, self.tapped = self.tapped, None
        assert tapped is not None
        return [with_taps(mx.concatenate(outputs), tapped, self.stage.tap_size)]

    def _one_by_one(
        self, parts: Sequence[SequenceRows], tokens: Sequence[int] | mx.array, hidden: mx.array | None
    ) -> list[mx.array]:
        outputs, at, tokens, last = [], 0, _ids(tokens), list[mx.array]()
        for part in parts:
            rows = slice(at, at := at + part.count)
            part.caches.release()
            ids, given = tokens[None, rows], None if hidden is None else hidden[None, rows]
            noting = self._noting(part.block, tokens[rows], None if hidden is None else hidden[rows])
            with children_watched(noting), part.caches.seeing_both_ways(part.start, part.count):
                y = self.stage(ids, part.caches, given, part.num_logits)
            kept = self.stage.take_tapped()
            last += [] if kept is None else [kept]
            if not self.stage.is_last or part.num_logits:
                outputs.append(y[0])
        self.tapped = mx.concatenate(last) if last else None
        return outputs

    def _noting(
        self, block: DraftedBlock | None, tokens: mx.array, hidden: mx.array | None
    ) -> list[tuple[Any, str, LayerWatch]]:
        """Return the watches that let a block record the calls of modules that take caches."""
        if block is None:
            return []
        block.given(tokens, hidden)
        return [(one.holder, one.key, block.call) for one in self.cache_consumers]

    def _by_rows(
        self, parts: Sequence[SequenceRows], tokens: Sequence[int] | mx.array, hidden: mx.array | None
    ) -> list[mx.array]:
        (step, to_step), ids, at = self._arrange(parts), _ids(tokens), 0
        for part in parts:
            rows = slice(at, at := at + part.count)
            if part.block is not None:
                part.block.given(ids[rows], None if hidden is None else hidden[rows])
        if to_step is not None:
            ids, hidden = ids[to_step], None if hidden is None else hidden[to_step]
        for cache in self._caches:
            cache.bind(step)
        try:
            with children_watched(self._each), ExitStack() as masks:
                for part in parts:
                    if part.caches.pictures:
                        masks.enter_context(part.caches.seeing_both_ways(part.start, part.count))
                y = self.stage.by_rows(ids[:, None], self._caches, None if hidden is None else hidden[:, None], step)
        finally:
            for cache in self._caches:
                cache.bind(None)  # otherwise they would hold the keys and values of finished sequences
        for part in parts:
            part.caches.place.position += part.count
        kept = self.stage.take_tapped()
        self.tapped = kept if kept is None or to_step is None else kept[mx.argsort(to_step)]
        if self.stage.is_last:
            return _in_order(y[:, 0], parts, step) if any(part.num_logits for part in parts) else []
        return [y[:, 0] if to_step is None else y[:, 0][mx.argsort(to_step)]]

    # -- grouping attention calls ------------------------------------------------------------

    def _arrange(self, parts: Sequence[SequenceRows]) -> tuple[RowStep, mx.array | None]:
        """Return a step that has the parts which share an attention call next to each other, and each other part as a
        group. Also return the plan's row for each row of the step, or ``None`` if the order is the same."""
        able = [i for i, p in enumerate(parts) if p.count == 1 and self._places and can_join(p.caches, self._places)]
        shared = share_calls([parts[i].start for i in able], pads=not self._exact)
        together = [[able[i] for i in group] for group in shared if len(group) > 1]
        taken = {i for group in together for i in group}
        order = sorted([*together, *([i] for i in range(len(parts)) if i not in taken)])
        groups, at = [], 0
        for group in order:
            members = tuple(parts[i] for i in group)
            groups.append(RowsCall(members, at, self._cohort(members)))
            at += sum(part.count for part in members)
        return RowStep(tuple(groups)), _row_order(parts, [i for group in order for i in group])

    def _cohort(self, parts: Sequence[SequenceRows]) -> Cohort | None:
        members = [part.caches for part in parts]
        if len(members) == 1:
            members[0].release()
            return None
        cohort = members[0].cohort
        if (
            cohort is None
            or [*map(id, cohort.members)] != [*map(id, members)]
            or any(m.cohort is not cohort for m in members)
        ):
            cohort = Cohort(members, self._places)
        cohort.begin_step()
        return cohort


def _in_order(logits: mx.array, parts: Sequence[SequenceRows], step: RowStep) -> list[mx.array]:
    """Return a step's logits in the order of the plan."""
    found, at = {}, 0
    for part in step.parts:
        found[id(part)] = range(at, at := at + part.num_logits)
    order = [row for part in parts for row in found[id(part)]]
    return [logits if order == sorted(order) else logits[mx.array(order)]]


def with_taps(rows: mx.array, tapped: mx.array, size: int) -> mx.array:
    """Return the rows [T, d] for a link, each cut into k rows of ``size`` numbers and followed by its row of the taps
    [T, ``size`` or less]: [(k + 1) T, size]."""
    count, width = rows.shape
    cut = _widened(rows, -(-width // size) * size).reshape(count, -1, size)
    return mx.concatenate([cut, _widened(tapped, size)[:, None].astype(rows.dtype)], axis=1).reshape(-1, size)


def _added(rows: mx.array, tapped: mx.array) -> mx.array:
    """Return the sum of ``rows`` [T, d] and ``tapped`` [T, e], which may be narrower."""
    return rows + _widened(tapped, rows.shape[1]).astype(rows.dtype)


def _widened(rows: mx.array, width: int) -> mx.array:
    more = width - rows.shape[1]
    return mx.pad(rows, [(0, 0), (0, more)]) if more else rows


def _ids(tokens: Sequence[int] | mx.array) -> mx.array:
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), dtype=mx.int32)


def arrays_to_evaluate(parts: Sequence[SequenceRows]) -> list[mx.array]:
    """Return the arrays that a step wrote: in its sequences' caches and cohorts, and in the records of draft blocks."""
    cohorts = {id(p.caches.cohort): p.caches.cohort for p in parts if p.caches.cohort is not None}
    found = [array for cohort in cohorts.values() for array in cohort.arrays()]
    found += [array for part in parts for array in part.caches.arrays()]
    return found + [array for part in parts if part.block is not None for array in part.block.arrays()]


def nbytes(sequences: Sequence[SequenceCaches]) -> int:
    """Return the bytes that sequences' caches and cohorts hold."""
    cohorts = {id(s.cohort): s.cohort for s in sequences if s.cohort is not None}
    shared = sum(array.nbytes for cohort in cohorts.values() for array in cohort.arrays())
    return shared + sum(array.nbytes for s in sequences for array in s.arrays())


def _row_order(parts: Sequence[SequenceRows], order: Sequence[int]) -> mx.array | None:
    """Return for each row of the step its row in the plan. Return None if the order is the same."""
    if list(order) == list(range(len(parts))):
        return None
    starts = [sum(part.count for part in parts[:i]) for i in range(len(parts))]
    return mx.array([starts[i] + n for i in order for n in range(parts[i].count)], dtype=mx.int32)
