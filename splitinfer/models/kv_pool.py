"""Every sequence's caches on this stage, and stored blocks: opened, saved, rolled back and freed as the plans say."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.errors import ProtocolError
from splitinfer.models.caches import copied_state, saved_state, states_of, trim
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_blocks import KVBlock, cut, join
from splitinfer.models.step import nbytes

_MOST_STATES = 8  # of a sequence; more than blocks of drafts are ever under way


@dataclass(slots=True)
class _Entry:
    """``states``: by position, what its caches held there that cannot be cut."""

    caches: SequenceCaches
    states: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def position(self) -> int:
        return self.caches.place.position


class KVPool:
    """Caches by sequence id, blocks by block id. Obeys; decides nothing."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[int, KVBlock] = {}

    def open(self, seq_id: int, blocks: Sequence[int] = (), length: int = 0) -> list[mx.array]:
        """Begin a sequence, empty or with the first ``length`` tokens of stored blocks; the arrays copied for it.

        Raises:
            ProtocolError: it is here already, or a block is not, or they do not hold those tokens.
        """
        if seq_id in self._entries:
            raise ProtocolError(f"sequence {seq_id} was opened twice")
        caches, copied = self._model.make_caches(), list[mx.array]()
        if blocks:
            found = [self._block(block_id) for block_id in blocks]
            try:
                copied = join(caches, self._model.own_places, found, length)
            except ValueError as error:
                raise ProtocolError(f"sequence {seq_id} cannot begin with blocks {list(blocks)}: {error}") from error
        self._entries[seq_id] = _Entry(caches)
        return copied

    def save(self, block_id: int, seq_id: int, start: int, end: int) -> KVBlock:
        """Keep a copy of a sequence's positions [start, end) as a block.

        Raises:
            ProtocolError: the block is here already, the sequence is not, or has not come that far.
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
        """Keep a block that came from elsewhere.

        Raises:
            ProtocolError: it is here already.
        """
        if block_id in self._blocks:
            raise ProtocolError(f"block {block_id} came twice")
        self._blocks[block_id] = block

    def drop(self, block_id: int) -> None:
        """Forget a block; an unknown one is no error."""
        self._blocks.pop(block_id, None)

    def _block(self, block_id: int) -> KVBlock:
        block = self._blocks.get(block_id)
        if block is None:
            raise ProtocolError(f"the plan begins with block {block_id}, which is not here")
        return block

    def at(self, seq_id: int, start: int) -> SequenceCaches:
        """The sequence's caches, rolled back to ``start`` tokens.

        Raises:
            ProtocolError: the sequence is not here, has not come that far, or cannot go back.
        """
        entry = self._entries.get(seq_id)
        if entry is None:
            raise ProtocolError(f"the plan runs sequence {seq_id}, which was never opened")
        back = entry.position - start
        if back < 0:
            raise ProtocolError(f"the plan runs sequence {seq_id} from {start}, but it stands at {entry.position}")
        if back > 0:
            self._rewind(entry, seq_id, back)
        return entry.caches

    def remember(self, seq_id: int) -> list[mx.array]:
        """Keep the states of a sequence as they are, to go back to; the arrays kept. Nothing where all can be cut."""
        entry = self._entries[seq_id]
        states = [one for cache in entry.caches.own for one in states_of(cache)]
        if not states:
            return []
        kept = [saved_state(cache) for cache in states]
        entry.states.pop(entry.position, None)
        entry.states[entry.position] = kept
        while len(entry.states) > _MOST_STATES:
            del entry.states[next(iter(entry.states))]
        return [leaf for _, leaf in tree_flatten(kept) if isinstance(leaf, mx.array)]

    def _rewind(self, entry: _Entry, seq_id: int, back: int) -> None:
        entry.caches.release()
        start = entry.position - back
        states = [one for cache in entry.caches.own for one in states_of(cache)]
        kept = entry.states.get(start)
        can_go = not states or (kept is not None and len(kept) == len(states))
        if not can_go or not all(trim(cache, back) for cache in entry.caches.own):
            raise ProtocolError(f"the caches of sequence {seq_id} cannot go back {back} tokens")
        for cache, state in zip(states, kept or (), strict=False):
            cache.state = copied_state(state)
        entry.states = {position: kept for position, kept in entry.states.items() if position <= start}
        entry.caches.place.position = start

    def free(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are no error, because freeing twice is the same as once."""
        entry = self._entries.pop(seq_id, None)
        if entry is not None and entry.caches.cohort is not None:
            entry.caches.cohort.forget(entry.caches)

    def clear(self) -> None:
        """Forget every sequence and every block."""
        self._entries.clear()
        self._blocks.clear()

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
