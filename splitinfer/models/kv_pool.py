"""Holds every sequence's caches on this stage, and stored blocks; opens, saves, rolls back and frees them as plans
command.

A step that writes to a sequence's arrays while another step with them is in flight copies all of them: MLX writes in
place only where nothing else refers to the memory, and the step in flight does. So launching ahead on one sequence
costs the time and the memory of its KV, and gains the time that the host takes to launch. ``must_end_first`` decides.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.errors import ProtocolError
from splitinfer.models.caches import copied_state, nbytes_written, saved_state, states_of, trim
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_blocks import KVBlock, cut, join
from splitinfer.models.step import nbytes

_MAX_STATES = 8  # of a sequence; more than the blocks of drafts that are ever in flight
MAX_COPIED = 64 * 2**20  # bytes: read and written in less than a millisecond, which is what a launch takes


@dataclass(slots=True)
class _Entry:
    """A sequence's caches; ``states``: by position, copies of the states that its caches had there."""

    caches: SequenceCaches
    states: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def position(self) -> int:
        return self.caches.place.position


class KVPool:
    """Caches by sequence id, blocks by block id. Does what plans command; decides nothing."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[int, KVBlock] = {}

    def open(self, seq_id: int, blocks: Sequence[int] = (), length: int = 0) -> list[mx.array]:
        """Open a sequence, empty or with the first ``length`` tokens of stored blocks; the arrays copied for it.

        Raises:
            ProtocolError: the sequence is open already, a block is unknown, or the blocks lack those tokens.
        """
        if seq_id in self._entries:
            raise ProtocolError(f"sequence {seq_id} was opened twice")
        caches, copied = self._model.make_caches(), list[mx.array]()
        if blocks:
            found = [self._block(block_id) for block_id in blocks]
            try:
                copied = join(caches, self._model.own_places, found, length)
            except ValueError as error:
                raise ProtocolError(f"sequence {seq_id} cannot start from blocks {list(blocks)}: {error}") from error
        self._entries[seq_id] = _Entry(caches)
        return copied

    def save(self, block_id: int, seq_id: int, start: int, end: int) -> KVBlock:
        """Store a copy of a sequence's positions [start, end) as a block.

        Raises:
            ProtocolError: the block is stored already, the sequence is not open, or has fewer than ``end`` tokens.
        """
        entry = self._entries.get(seq_id)
        if entry is None or block_id in self._blocks:
            raise ProtocolError(f"sequence {seq_id} cannot be saved as block {block_id}")
        if not start < end <= entry.position:
            raise ProtocolError(
                f"positions {start} to {end} of sequence {seq_id}, at {entry.position}, cannot be saved"
            )
        block = self._blocks[block_id] = cut(entry.caches, self._model.own_places, start, end)
        return block

    def put(self, block_id: int, block: KVBlock) -> None:
        """Store a block that was not cut from a sequence here.

        Raises:
            ProtocolError: it is stored already.
        """
        if block_id in self._blocks:
            raise ProtocolError(f"block {block_id} was stored twice")
        self._blocks[block_id] = block

    def drop(self, block_id: int) -> None:
        """Drop a block; an unknown one is no error."""
        self._blocks.pop(block_id, None)

    def _block(self, block_id: int) -> KVBlock:
        block = self._blocks.get(block_id)
        if block is None:
            raise ProtocolError(f"the plan starts a sequence from block {block_id}, but that block is not stored")
        return block

    def at(self, seq_id: int, start: int) -> SequenceCaches:
        """The sequence's caches, rolled back to ``start`` tokens.

        Raises:
            ProtocolError: the sequence is not open, has fewer tokens, or cannot be rolled back that far.
        """
        entry = self._entries.get(seq_id)
        if entry is None:
            raise ProtocolError(f"the plan runs sequence {seq_id}, which was never opened")
        back = entry.position - start
        if back < 0:
            raise ProtocolError(f"the plan runs sequence {seq_id} from {start}, but it is at {entry.position}")
        if back > 0:
            self._rewind(entry, seq_id, back)
        return entry.caches

    def remember(self, seq_id: int) -> list[mx.array]:
        """Save a sequence's states for a later rollback; the arrays saved, none if all its caches can be cut."""
        entry = self._entries[seq_id]
        states = [one for cache in entry.caches.own for one in states_of(cache)]
        if not states:
            return []
        saved = [saved_state(cache) for cache in states]
        entry.states.pop(entry.position, None)
        entry.states[entry.position] = saved
        while len(entry.states) > _MAX_STATES:
            del entry.states[next(iter(entry.states))]
        return [leaf for _, leaf in tree_flatten(saved) if isinstance(leaf, mx.array)]

    def _rewind(self, entry: _Entry, seq_id: int, back: int) -> None:
        entry.caches.release()
        start = entry.position - back
        states = [one for cache in entry.caches.own for one in states_of(cache)]
        saved = entry.states.get(start)
        can_restore = not states or (saved is not None and len(saved) == len(states))
        if not can_restore or not all(trim(cache, back) for cache in entry.caches.own):
            raise ProtocolError(f"the caches of sequence {seq_id} cannot go back {back} tokens")
        for cache, state in zip(states, saved or (), strict=False):
            cache.state = copied_state(state)
        entry.states = {position: state for position, state in entry.states.items() if position <= start}
        entry.caches.place.position = start

    def free(self, seq_id: int) -> None:
        """Free a sequence; an unknown one is no error."""
        entry = self._entries.pop(seq_id, None)
        if entry is not None and entry.caches.cohort is not None:
            entry.caches.cohort.forget(entry.caches)

    def clear(self) -> None:
        """Free every sequence and every block."""
        self._entries.clear()
        self._blocks.clear()

    def must_end_first(self, step: Collection[int], in_flight: Sequence[Collection[int]]) -> int:
        """How many of the steps in flight have to be done before a step is launched, because it would copy too much.

        ``step``: the ids of its sequences; ``in_flight``: those of the steps launched and not known to be done, the
        oldest first. As steps end in their order, the answer is how many of the oldest to wait for.
        """
        copied = 0
        for number in range(len(in_flight), 0, -1):
            again = set(step) & set(in_flight[number - 1])
            copied += sum(self._nbytes_written(seq_id) for seq_id in again)
            if copied > MAX_COPIED:
                return number
        return 0

    def _nbytes_written(self, seq_id: int) -> int:
        """Bytes of the arrays that the next step writes to; 0 for a sequence that is not open."""
        entry = self._entries.get(seq_id)
        if entry is None:
            return 0
        cohort = entry.caches.cohort
        shared = sum(array.nbytes for array in cohort.arrays()) if cohort is not None else 0
        return shared + sum(nbytes_written(cache) for cache in entry.caches.own)

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences."""
        return nbytes([entry.caches for entry in self._entries.values()])

    @property
    def stored_nbytes(self) -> int:
        """Bytes held for blocks."""
        return sum(block.nbytes for block in self._blocks.values())

    def __len__(self) -> int:
        return len(self._entries)
