"""Holds every sequence's caches and the stored blocks of this stage. Opens, saves, rolls back, retains and frees them
as plans command.

A step that writes to a sequence's arrays while another step with them is in flight copies all of them: MLX writes in
place only if nothing else refers to the memory, and the step in flight does. So launching ahead on one sequence costs
the time and memory of a copy of its KV, and saves the host's launch time. ``must_end_first`` decides.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from splitinfer.core.picture import Picture
from splitinfer.errors import ProtocolError
from splitinfer.models.caches.caches import nbytes_written, trim
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.kv_blocks import KVBlock, cut, join
from splitinfer.models.caches.rollback import DraftedBlock, Rollback, state_caches
from splitinfer.models.cut.cut import StageModel

MAX_COPIED = 64 * 2**20  # bytes: copied in less than a millisecond, the time of a launch


@dataclass(slots=True)
class _Entry:
    """A sequence's caches. ``drafted``: if it has states, the blocks of drafts without a verdict, oldest first."""

    caches: SequenceCaches
    drafted: list[DraftedBlock] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.caches.place.position


class KVPool:
    """Caches by sequence id and blocks by block id. Executes plans, decides nothing. ``rollback``: the way to roll
    back."""

    def __init__(self, model: StageModel, rollback: Rollback = Rollback.MODULES) -> None:
        self._model, self._places, self.rollback = model, model.kv_places, rollback
        self._entries: dict[int, _Entry] = {}
        self._retained: dict[int, _Entry] = {}  # sequences that have ended
        self._blocks: dict[int, KVBlock] = {}

    def open(
        self, seq_id: int, blocks: Sequence[int] = (), length: int = 0, pictures: tuple[Picture, ...] = ()
    ) -> list[mx.array]:
        """Open a sequence, empty or with the first ``length`` tokens of stored blocks. Return the arrays copied for it.
        ``pictures``: the pictures among its tokens.

        Raises:
            ProtocolError: the sequence is open already, a block is unknown, or the blocks lack those tokens.
        """
        if seq_id in self._entries:
            raise ProtocolError(f"sequence {seq_id} was opened twice")
        caches, copied = self._model.make_caches(), list[mx.array]()
        if blocks:
            found = [self._block(block_id) for block_id in blocks]
            try:
                copied = join(caches, self._places, found, length)
            except ValueError as error:
                raise ProtocolError(f"sequence {seq_id} cannot start from blocks {list(blocks)}: {error}") from error
        caches.pictures = pictures
        self._entries[seq_id] = _Entry(caches)
        return copied

    def retain(self, seq_id: int) -> None:
        """Keep the KV of a sequence that has ended, so that another can take it over.

        Raises:
            ProtocolError: the sequence is not open.
        """
        entry = self._entries.pop(seq_id, None)
        if entry is None:
            raise ProtocolError(f"sequence {seq_id} cannot be retained: it is not open")
        entry.caches.release()
        self._retained[seq_id] = entry

    def take_over(self, seq_id: int, retained: int, length: int, pictures: tuple[Picture, ...] = ()) -> None:
        """Open a sequence in the KV of the sequence ``retained``, with its first ``length`` tokens. Copies nothing.

        Raises:
            ProtocolError: the sequence is open already, or the other was not retained, has fewer tokens, or cannot be
                rolled back that far.
        """
        entry = self._retained.pop(retained, None)
        if seq_id in self._entries or entry is None or entry.position < length:
            raise ProtocolError(f"sequence {seq_id} cannot take over {length} tokens of sequence {retained}")
        entry.drafted.clear()
        if entry.position > length:
            self._rewind(entry, retained, entry.position - length)
        entry.caches.pictures = pictures
        self._entries[seq_id] = entry

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
        block = self._blocks[block_id] = cut(entry.caches, self._places, start, end)
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
        """Drop a block. An unknown id is ignored."""
        self._blocks.pop(block_id, None)

    def _block(self, block_id: int) -> KVBlock:
        block = self._blocks.get(block_id)
        if block is None:
            raise ProtocolError(f"the plan starts a sequence from block {block_id}, but that block is not stored")
        return block

    def at(self, seq_id: int, start: int) -> SequenceCaches:
        """Return the sequence's caches, rolled back to ``start`` tokens.

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

    def begin(self, seq_id: int, num_drafts: int, *, follows: bool) -> DraftedBlock | None:
        """Begin a slice at a sequence's position. Return the record that it must fill for a rollback, or ``None`` if
        the slice has no drafts or the sequence no states.

        ``follows``: the slice begins with a draft. If not, all tokens before it have their verdict.
        """
        entry = self._entries[seq_id]
        if not follows:
            entry.drafted.clear()
        block = DraftedBlock.of(entry.caches, self.rollback) if num_drafts else None
        if block is not None:
            entry.drafted.append(block)
        return block

    def _rewind(self, entry: _Entry, seq_id: int, back: int) -> None:
        caches, start = entry.caches, entry.position - back
        caches.release()
        entry.drafted = [block for block in entry.drafted if block.start <= start]
        block = entry.drafted[-1] if entry.drafted else None
        if block is None and state_caches(caches):
            raise ProtocolError(f"the caches of sequence {seq_id} cannot go back {back} tokens")
        resumed = start if block is None else block.resumes_at(start)
        if not all(trim(cache, entry.position - resumed) for cache in caches.own):
            raise ProtocolError(f"the caches of sequence {seq_id} cannot go back {back} tokens")
        caches.rewind_heads(start)
        caches.place.position = resumed
        if block is not None:
            block.restore(self._model, caches, start - block.start)
        caches.place.position = start

    def free(self, seq_id: int) -> None:
        """Free a sequence. An unknown id is ignored."""
        self._retained.pop(seq_id, None)
        entry = self._entries.pop(seq_id, None)
        if entry is not None:
            entry.caches.close()

    def clear(self) -> None:
        """Free every sequence and every block."""
        for held in (self._entries, self._retained, self._blocks):
            held.clear()

    def must_end_first(self, step: Collection[int], in_flight: Sequence[Collection[int]]) -> int:
        """Return how many of the oldest steps in flight must be done before a step is launched. If it were launched
        now, it would copy too much. (Steps end in their order.)

        ``step``: the ids of its sequences. ``in_flight``: the sequences' ids of each step that was launched and is not
        known to be done, oldest first.
        """
        copied = 0
        for number in range(len(in_flight), 0, -1):
            again = set(step) & set(in_flight[number - 1])
            copied += sum(self._nbytes_written(seq_id) for seq_id in again)
            if copied > MAX_COPIED:
                return number
        return 0

    def _nbytes_written(self, seq_id: int) -> int:
        """Return the bytes of the arrays that the next step writes to; 0 for a sequence that is not open."""
        entry = self._entries.get(seq_id)
        if entry is None:
            return 0
        cohort = entry.caches.cohort
        shared = sum(array.nbytes for array in cohort.arrays()) if cohort is not None else 0
        return shared + sum(nbytes_written(cache) for cache in (*entry.caches.own, *entry.caches.heads))
