"""Who gets KV in the step being planned, and who gives up its own for it.

Nothing happens here: the ledger adds up what would happen, so that asking whether a step can be planned and
planning it are one computation. Where memory is short, in this order:

    1. stored blocks go, the least recently used first, but not those that a newcomer of this step begins with
    2. of the running ones that are junior to whoever needs the memory and not in flight, the most junior
    3. else whoever needs it stays where it is, with what it has, and goes on when others have ended

Rank decides (priority, then arrival), and nobody gives up for a junior, so the most senior sequence always
goes on once results are back, and two never take the memory from each other in turn.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from splitinfer.core.kv.block_tree import Block
from splitinfer.core.kv.budget import STORED_BLOCK, KVBudget, KVUse, growth, use_of
from splitinfer.core.sequence import Sequence


class KVAllocation:
    """``used`` is what all have now, stored blocks included; ``evictable`` yields those in the order in which they may
    go, but for the ``pinned`` ones; ``running`` in any order."""

    def __init__(
        self,
        budget: KVBudget,
        used: KVUse,
        evictable: Iterator[Block],
        running: Iterable[Sequence],
        pinned: Collection[Block] = (),
    ) -> None:
        self._budget = budget
        self.used = used
        self.preempted: list[Sequence] = []
        self.evicted: list[Block] = []
        self._pinned = set(pinned)
        self._source = evictable
        self._next: list[Block] = []  # taken from the source, and still there
        self._running = running
        self._idle: list[Sequence] | None = None  # who may give up, most junior last; sorted only when needed
        self._kept: set[int] = set()
        self._is_short = False

    def is_preempted(self, seq: Sequence) -> bool:
        """Whether a sequence makes room for another in this step."""
        return seq in self.preempted

    def admit(self, promised: KVUse, begins_with: Iterable[Block]) -> bool:
        """Whether ``promised``, for all that run and one more, fits; blocks go for it, but not its own."""
        return self.fetch(promised, 0, begins_with)

    def fetch(self, promised: KVUse, num_blocks: int, begins_with: Iterable[Block]) -> bool:
        """Whether so many blocks more would fit, too; they are counted from now on."""
        pinned = self._pinned | set(begins_with)
        use = promised + KVUse(stored=self.used.stored + num_blocks)
        going: list[Block] = []
        for block in self._evictable(pinned):
            if self._budget.fits(use):
                break
            going.append(block)
            use -= STORED_BLOCK
        if not self._budget.fits(use):
            return False
        self._pinned = pinned
        self._evict(going)
        self.used += KVUse(stored=num_blocks)
        return True

    def allocate(self, seq: Sequence, before: int, after: int) -> bool:
        """Whether a sequence with KV of ``before`` tokens gets what it needs for ``after``."""
        need = growth(before, after)
        if not self._budget.fits(self.used + need):
            leaving = None if self._is_short else self._enough(need, seq)
            if leaving is None:
                # The least anybody needs is one block, and juniors have fewer to take it from.
                self._is_short |= need == KVUse(0, 1)
                return False
            self._evict(leaving.blocks)
            self._preempt(leaving.sequences)
        self.used += need
        self._kept.add(seq.seq_id)
        return True

    def allocate_spare(self, before: int, after: int) -> bool:
        """Whether KV of ``before`` tokens may grow to ``after`` with nobody giving up anything; it has it then."""
        need = growth(before, after)
        if not self._budget.fits(self.used + need):
            return False
        self.used += need
        return True

    def _enough(self, need: KVUse, seq: Sequence) -> "_Leaving | None":
        """The fewest, in order, that make room for ``need``; ``None`` if all together do not."""
        use, leaving = self.used + need, _Leaving([], [])
        for block in self._evictable(self._pinned):
            if self._budget.fits(use):
                return leaving
            use -= STORED_BLOCK
            leaving.blocks.append(block)
        for one in self._may_be_preempted_for(seq):
            if self._budget.fits(use):
                return leaving
            use -= use_of(one.kv_tokens)
            leaving.sequences.append(one)
        return leaving if self._budget.fits(use) else None

    def _evictable(self, pinned: Collection[Block]) -> Iterator[Block]:
        at = 0
        while True:
            if at == len(self._next):
                block = next(self._source, None)
                if block is None:
                    return
                self._next.append(block)
            if self._next[at] not in pinned:
                yield self._next[at]
            at += 1

    def _may_be_preempted_for(self, seq: Sequence) -> Iterator[Sequence]:
        if self._idle is None:
            idle = (one for one in self._running if not one.num_in_flight and one.kv_tokens)
            self._idle = sorted(idle, key=lambda one: one.rank)
        for one in reversed(self._idle):
            if one.rank <= seq.rank:
                return
            # Who has been promised memory in this step was asked before, so it is senior; or it joins just now.
            if one.seq_id not in self._kept:
                yield one

    def _evict(self, going: Iterable[Block]) -> None:
        for block in going:
            self._next.remove(block)
            self.evicted.append(block)
            self.used -= STORED_BLOCK

    def _preempt(self, leaving: list[Sequence]) -> None:
        for seq in leaving:
            self.preempted.append(seq)
            self.used -= use_of(seq.kv_tokens)
            if self._idle and seq in self._idle:
                self._idle.remove(seq)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Who makes room."""

    blocks: list[Block]
    sequences: list[Sequence]
