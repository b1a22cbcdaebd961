"""Allocates KV to the sequences of the step being planned, and chooses what is evicted or preempted for it.

A ``KVAllocation`` only adds up what would happen, so that asking whether a step can be planned and planning it are one
computation. Where memory is short, in this order:

    1. stored blocks are evicted, those of open conversations last, the least recently used first, except those that
       sequences of this step begin with
    2. of the running sequences that rank below the one in need and are not in flight, the lowest is preempted
    3. else the sequence in need keeps what it has, and continues when others have ended

Rank decides (priority, then arrival), and no sequence is preempted for one of lower rank. So the highest-ranked
sequence always continues once results are back, and two never take the memory from each other in turn.
"""

from collections.abc import Collection, Iterable, Iterator

from splitinfer.core.kv.block_tree import Block
from splitinfer.core.kv.budget import NOTHING, STORED_BLOCK, KVBudget, KVUse
from splitinfer.core.sequence import Sequence


class KVAllocation:
    """KV of one step: what is used, and what is evicted and preempted for it.

    used: what all sequences and stored blocks take now; grows as KV is allocated.
    evictable: stored blocks in the order in which they may be evicted, except the ``pinned`` ones.
    running: the running sequences, in any order.
    """

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
        self._next: list[Block] = []  # taken from the source and not evicted yet
        self._running = running
        self._idle: list[Sequence] | None = None  # preemptible, lowest rank last; sorted only when needed
        self._granted: set[int] = set()
        self._is_short = False

    def is_preempted(self, seq: Sequence) -> bool:
        """Whether a sequence is preempted for another in this step."""
        return seq in self.preempted

    def admit(self, reserved: KVUse, begins_with: Iterable[Block]) -> bool:
        """Whether ``reserved``, for all running sequences and one more, fits. Blocks are evicted for it, except
        those in ``begins_with``."""
        return self.fetch(reserved, 0, begins_with)

    def fetch(self, reserved: KVUse, num_blocks: int, begins_with: Iterable[Block]) -> bool:
        """The same with ``num_blocks`` more stored blocks, which are then counted as used."""
        pinned = self._pinned | set(begins_with)
        use = reserved + KVUse(stored=self.used.stored + num_blocks)
        evicted: list[Block] = []
        for block in () if self._budget.fits(use) else self._evictable(pinned):
            if self._budget.fits(use):
                break
            evicted.append(block)
            use -= STORED_BLOCK
        if not self._budget.fits(use):
            return False
        self._pinned = pinned
        self._evict(evicted)
        self.used += KVUse(stored=num_blocks)
        return True

    def allocate(self, seq: Sequence, before: int, after: int) -> bool:
        """Grow a sequence's KV from ``before`` to ``after`` tokens, by eviction and preemption if needed; whether it
        fits."""
        need = self._budget.growth(before, after)
        if not self._budget.fits(self.used + need):
            victims = None if self._is_short else self._victims_for(need, seq)
            if victims is None:
                # One block is the least that a sequence needs, and lower ranks have fewer victims.
                self._is_short |= need == KVUse(0, self._budget.block)
                return False
            self._evict(victims[0])
            self._preempt(victims[1])
        self.used += need
        self._granted.add(seq.seq_id)
        return True

    def allocate_spare(self, before: int, after: int, reserve: KVUse = NOTHING) -> bool:
        """Grow KV from ``before`` to ``after`` tokens if that fits, beside ``reserve``, without eviction or preemption;
        whether it does."""
        need = self._budget.growth(before, after)
        if need != NOTHING and not self._budget.fits(self.used + need + reserve):
            return False
        self.used += need
        return True

    def _victims_for(self, need: KVUse, seq: Sequence) -> tuple[list[Block], list[Sequence]] | None:
        """The fewest blocks and sequences that make room for ``need``; ``None`` if all together do not."""
        use, blocks, victims = self.used + need, list[Block](), list[Sequence]()
        for block in self._evictable(self._pinned):
            if self._budget.fits(use):
                return blocks, victims
            use -= STORED_BLOCK
            blocks.append(block)
        for one in self._may_be_preempted_for(seq):
            if self._budget.fits(use):
                return blocks, victims
            use -= self._budget.use_of(one.kv_tokens)
            victims.append(one)
        return (blocks, victims) if self._budget.fits(use) else None

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
            # Sequences with KV granted in this step rank higher, or are just being admitted.
            if one.seq_id not in self._granted:
                yield one

    def _evict(self, evicted: Iterable[Block]) -> None:
        for block in evicted:
            self._next.remove(block)
            self.evicted.append(block)
            self.used -= STORED_BLOCK

    def _preempt(self, victims: list[Sequence]) -> None:
        for seq in victims:
            self.preempted.append(seq)
            self.used -= self._budget.use_of(seq.kv_tokens)
            if self._idle and seq in self._idle:
                self._idle.remove(seq)
