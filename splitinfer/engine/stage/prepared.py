"""Graphs of likely steps, built before the steps arrive, while there is nothing else to do.

Building a step's graph takes Python milliseconds, and an idle device waits meanwhile. Most steps decode the same
sequences as an earlier step, one position further. Only the token ids are unknown, the hidden states except on the
first stage, and on the last stage the masks of answers in a form. So the graph is built ahead, on inputs whose memory
is filled when the step arrives.

If another step arrives, the caches are restored (``Snapshot``): MLX computes nothing while a graph is built, but
offsets grow, and caches refer to the graph's arrays. While a snapshot holds the earlier arrays, computing the graph
copies what it would write in place, so the snapshot is dropped first.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import mlx.core as mx

from splitinfer.core.plan import Slice, StepPlan
from splitinfer.engine.stage.launched import StepGraph
from splitinfer.engine.stage.masking import Masks
from splitinfer.models.caches.caches import is_list
from splitinfer.models.caches.cohort import SequenceCaches

_MAX_NOTED = 8  # more than the groups of any pipeline
_PLAIN = (int, float, bool, str, type(None))  # most values; calling ``_handle`` for each would cost more than the rest


class Snapshot:
    """The state of some sequences' caches, and of the cohorts that they are in. In a cohort, a member's own caches are
    empty at the cohort's places, so the snapshot does not read them."""

    def __init__(self, sequences: Iterable[SequenceCaches]) -> None:
        sequences = list(sequences)
        cohorts = {id(one.cohort): one.cohort for one in sequences if one.cohort is not None}
        self._members = [
            (member, cohort) for cohort in cohorts.values() for member in cohort.members if member.cohort is cohort
        ]
        self._alone = [one for one in sequences if one.cohort is None]
        caches = [cache for one in self._alone for cache in one.own]
        caches += [cache for member, cohort in self._members for cache in cohort.others_of(member)]
        self._positions = [(one.place, one.place.position) for one in sequences]
        things = [*cohorts.values(), *(part for one in caches for part in _with_parts(one))]
        self._before = [(thing, _attributes(thing)) for thing in things]

    def restore(self) -> None:
        """Restore the caches. Call once only, because the caches then use the snapshot's handles."""
        for place, position in self._positions:
            place.position = position
        for thing, before in self._before:
            vars(thing).clear()
            vars(thing).update(before)
        for sequence in self._alone:
            sequence.cohort = None
        for member, cohort in self._members:
            cohort.hold(member)


def _with_parts(cache: Any) -> Iterator[Any]:
    """Yield a cache, and if it is a list of caches, also these."""
    yield cache
    for one in cache.caches if is_list(cache) else ():
        yield from _with_parts(one)


def _attributes(thing: Any) -> dict[str, Any]:
    return {name: v if type(v) in _PLAIN else _handle(v) for name, v in vars(thing).items()}


def _handle(value: Any) -> Any:
    """Return a copy of the value with new handles for its arrays, so that assignments to the originals do not change
    it."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_handle, value))
    if type(value) is dict:
        return {key: _handle(one) for key, one in value.items()}
    return value


class Likely(NamedTuple):
    """A likely step: its slices, without token ids, and the sequences for which it will bring masks."""

    slices: tuple[Slice, ...] = ()
    masked: frozenset[int] = frozenset()


def _memory(array: mx.array) -> memoryview:
    return memoryview(cast(Any, array))  # MLX's stubs lack the buffer protocol


class PreparedStep:
    """A graph of ``slices`` with inputs that ``fill`` writes: [T] int32 token ids, the [T, d] hidden states as unsigned
    integers (``None`` on the first stage), and by sequence the [vocabulary] mask of its row.

    ``outputs``: the arrays that the host reads when the step is done; ``pending``: the arrays that the step writes.
    """

    def __init__(
        self,
        slices: tuple[Slice, ...],
        graph: StepGraph,
        inputs: tuple[mx.array, mx.array | None],
        snapshot: Snapshot,
        masks: Mapping[int, mx.array],
    ) -> None:
        self.slices, self.snapshot = slices, cast(Snapshot | None, snapshot)
        self.graph, self.outputs, self.pending = replace(graph, pending=()), graph.outputs(), graph.pending
        ids, hidden = inputs
        self._ids, self._masks = _memory(ids), {seq_id: _memory(mask) for seq_id, mask in masks.items()}
        self._hidden = None if hidden is None else _memory(hidden).cast("B")

    def fill(self, slices: tuple[Slice, ...], hidden: memoryview | None, masks: Masks | None) -> None:
        """Write the inputs."""
        for (seq_id, _), mask in masks().items() if masks is not None else ():  # a row each
            self._masks[seq_id][:] = _memory(mask)
        for at, part in enumerate(slices):
            self._ids[at] = part.token_ids[0]
        if self._hidden is not None and hidden is not None:
            self._hidden[:] = hidden

    def takes(self, hidden: memoryview | None, masks: Masks | None) -> bool:
        """Return whether these hidden states and masks fit its inputs. Waits for the masks if the hidden states fit."""
        if (0 if self._hidden is None else self._hidden.nbytes) != (0 if hidden is None else hidden.nbytes):
            return False
        return {seq_id for seq_id, _ in (masks() if masks is not None else ())} == self._masks.keys()


class PreparedSteps:
    """The prepared steps, and the likely steps that could be prepared."""

    def __init__(self) -> None:
        self._noted: deque[Likely] = deque(maxlen=_MAX_NOTED)
        self._prepared: dict[frozenset[int], PreparedStep] = {}

    def note(self, plan: StepPlan, masks: Masks | None) -> None:
        """Note the step that is likely to follow a launched plan, so that it may be prepared."""
        if slices := plan.following:
            self._noted.append(
                Likely(slices, frozenset(seq_id for seq_id, _ in (masks() if masks is not None else ())))
            )

    def next_wanted(self) -> Likely:
        """Return a likely step to prepare; it has no slices if there is nothing to do."""
        return self._noted.popleft() if self._noted else Likely()

    def add(self, step: PreparedStep) -> None:
        """Keep a prepared step."""
        self._prepared[_sequences(step.slices)] = step

    def take(self, plan: StepPlan, hidden: memoryview | None, masks: Masks | None = None) -> PreparedStep | None:
        """Return the prepared step for a plan, or None. Undo the prepared steps that the plan makes impossible. Call
        before any part of the plan is carried out."""
        if not self._prepared and not self._noted:
            return None
        key, others = _sequences(plan.slices), {save.seq_id for save in plan.saves} | set(plan.ended)
        wanted = self._prepared.get(key)
        if wanted is None or key & others or not _agree(wanted.slices, plan.slices) or not wanted.takes(hidden, masks):
            self._undo(others | key)
            return None
        self._undo(others)
        del self._prepared[key]
        wanted.snapshot = None  # otherwise computing would copy the arrays instead of writing in place
        return wanted

    def _undo(self, seq_ids: set[int]) -> None:
        """Undo every prepared step with one of these sequences, and forget the likely ones."""
        for key in [key for key in self._prepared if key & seq_ids]:
            step = self._prepared.pop(key)
            if step.snapshot is not None:
                step.snapshot.restore()
                step.snapshot = None
        if seq_ids:
            stay = [one for one in self._noted if not _sequences(one.slices) & seq_ids]
            self._noted = deque(stay, maxlen=_MAX_NOTED)

    def clear(self) -> None:
        """Forget all steps without restoring caches, because the caches are gone."""
        self._prepared.clear()
        self._noted.clear()


def _sequences(slices: tuple[Slice, ...]) -> frozenset[int]:
    return frozenset(part.seq_id for part in slices)


def _agree(prepared: tuple[Slice, ...], slices: tuple[Slice, ...]) -> bool:
    """Return whether the slices equal the prepared ones, apart from their token ids."""
    return len(prepared) == len(slices) and all(
        (a.seq_id, a.start) == (b.seq_id, b.start) and b.is_decode for a, b in zip(prepared, slices, strict=True)
    )
