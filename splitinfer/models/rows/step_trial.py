"""Tries a way to run many sequences: it computes the same small steps together and one sequence at a time.

The reference runs one sequence at a time, in the same chunks. Its own rounding is measured with the rows of its chunks,
one at a time. If a few layers have been tried in place of all, the whole stage runs two steps: each layer and the head
once with a chunk, and once with sequences that attend together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import mlx.core as mx

from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.cut.cut import StageModel
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

SmallSteps = Sequence[Sequence[tuple[int, int, int]]]

# (sequence, rows, logits): chunks; a chunk beside a decode; decodes of equal length, not in order; a chunk beside
# decodes; decodes of unequal length.
ALL_STEPS: SmallSteps = (
    ((0, 3, 1), (1, 2, 0), (2, 4, 4)),
    ((0, 2, 2), (1, 3, 1), (2, 1, 1)),
    ((1, 1, 1), (0, 1, 1), (2, 1, 1)),
    ((2, 2, 1), (0, 1, 1), (1, 1, 1)),
    ((0, 1, 1), (1, 1, 1), (2, 1, 1)),
)
# Chunks, one with two rows of logits to measure the head's own rounding; decodes of equal length, not in order.
TWO_STEPS: SmallSteps = (((0, 2, 0), (1, 2, 2)), ((1, 1, 1), (0, 1, 1)))
_SEQUENCES = 3
_TOKENS = 32  # ids below this; every vocabulary has them

RunSteps = Callable[[Sequence[SequenceRows], Sequence[int], mx.array | None], list[mx.array]]
InOrder = Callable[[], Sequence[SequenceRows]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """One sequence's rows of a step, run alone: its layers' rows and its output rows (empty if none wants logits)."""

    start: int
    logits: int
    ids: list[int]
    hidden: mx.array | None
    calls: list[LayerCall]
    outputs: list[mx.array]


def trial_of(
    stage: StageModel, alone: RunSteps, in_order: InOrder, steps: SmallSteps
) -> Callable[[RunSteps], str | None]:
    """Return a trial: a function that runs steps of several sequences in a given way, and returns why the results are
    wrong, or ``None`` if they differ from the reference by rounding at most.

    ``alone``: runs a step one sequence after the other. ``in_order``: returns the parts of a step of several in the
    order of its rows, while that step is being built.
    """
    at = cache(lambda number: _Round(stage, alone, in_order, number, steps))  # one reference serves every way
    return lambda run: reason_to_refuse(lambda number: at(number).errors(run), lambda number: at(number).noise)


class _Round:
    """The trial with the tokens of one round."""

    def __init__(self, stage: StageModel, alone: RunSteps, in_order: InOrder, number: int, steps: SmallSteps) -> None:
        self._stage, self._run_alone, self._in_order, self._number, self._steps = stage, alone, in_order, number, steps

    def errors(self, run: RunSteps) -> Errors:
        """Return the errors of the way on trial, compared with one sequence at a time."""
        errors, caches = RowErrors(), self._caches()
        for number, step in enumerate(self._steps):
            slices = self._reference[number]
            parts = [SequenceRows(caches[i], slices[i].start, n, logits) for i, n, logits in step]
            of_part = {id(part): slices[i] for part, (i, _, _) in zip(parts, step, strict=True)}

            def calls(of_part: dict[int, _Slice] = of_part) -> list[LayerCall]:
                return joined([of_part[id(part)].calls for part in self._in_order()])

            ids, hidden = self._tokens(number, step)
            with following(self._stage, len(ids), calls, errors):
                outputs = run(parts, ids, hidden)
            wanted = [output for i, _, _ in step for output in slices[i].outputs]
            errors.add_outputs(mx.concatenate(outputs), mx.concatenate(wanted))
        return errors.evaluated()

    @cached_property
    def noise(self) -> Errors:
        """The errors of the reference's chunks, compared with the same rows one at a time."""
        errors, caches = RowErrors(), self._caches()
        for number, step in enumerate(self._steps):
            for i, count, _ in step:
                self._row_by_row(self._reference[number][i], caches[i], count, errors)
        return errors.evaluated()

    def _row_by_row(self, one: _Slice, caches: SequenceCaches, count: int, errors: RowErrors) -> None:
        found = RowErrors() if count == 1 else errors  # a chunk of one row cannot be cut in another way
        outputs: list[mx.array] = []
        for row in range(count):
            part = SequenceRows(caches, one.start + row, 1, int(row >= count - one.logits))
            hidden = None if one.hidden is None else one.hidden[row : row + 1]
            calls = rows_of(one.calls, row, row + 1)
            with following(self._stage, 1, lambda calls=calls: calls, found):  # type: ignore[misc]
                outputs += self._run_alone([part], one.ids[row : row + 1], hidden)
        if one.outputs:
            found.add_outputs(mx.concatenate(outputs), mx.concatenate(one.outputs))

    @cached_property
    def _reference(self) -> list[dict[int, _Slice]]:
        """Each step's slices, by sequence, evaluated."""
        caches, steps = self._caches(), list[dict[int, _Slice]]()
        for number, step in enumerate(self._steps):
            ids, hidden = self._tokens(number, step)
            slices, at = dict[int, _Slice](), 0
            for i, count, logits in step:
                rows = slice(at, at := at + count)
                slices[i] = self._alone(caches[i], logits, ids[rows], None if hidden is None else hidden[rows])
            mx.eval(
                [[call.returned for call in one.calls] + one.outputs for one in slices.values()],
                [one.arrays() for one in caches],
            )
            steps.append(slices)
        return steps

    def _alone(self, caches: SequenceCaches, logits: int, ids: list[int], hidden: mx.array | None) -> _Slice:
        start = caches.place.position
        with recording(self._stage, len(ids)) as calls:
            outputs = self._run_alone([SequenceRows(caches, start, len(ids), logits)], ids, hidden)
        return _Slice(start, logits, ids, hidden, calls, outputs)

    def _caches(self) -> list[SequenceCaches]:
        return [self._stage.make_caches() for _ in range(_SEQUENCES)]

    def _tokens(self, number: int, step: Sequence[tuple[int, int, int]]) -> tuple[list[int], mx.array | None]:
        """Return a step's made-up tokens, and hidden states [T, d] unless the stage is the first."""
        count, salt = sum(rows for _, rows, _ in step), number + len(self._steps) * self._number
        ids = [(7 * i + 3 * salt) % _TOKENS for i in range(count)]
        return ids, self._stage.made_up_hidden(count, salt)
