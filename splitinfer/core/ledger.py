"""Who gets KV in the step being planned, and who gives up its own for it.

Nothing happens here: the ledger adds up what would happen, so that asking whether a step can be planned and
planning it are one computation. Where memory is short, in this order:

    1. sessions that nobody uses give up, the oldest first
    2. of the running ones that are junior to whoever needs the memory and not in flight, the most junior
    3. else whoever needs it stays where it is, with what it has, and goes on when others have ended

Rank decides (priority, then arrival), and nobody gives up for a junior, so the most senior sequence always
goes on once results are back, and two never take the memory from each other in turn.
"""

from collections.abc import Iterable, Iterator

from splitinfer.core.kv_budget import KVBudget, KVUse, growth, use_of
from splitinfer.core.sequence import Sequence


class Ledger:
    """``used`` is what all have now; ``held`` come oldest first; ``running`` in any order."""

    def __init__(self, budget: KVBudget, used: KVUse, held: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        self._budget = budget
        self.used = used
        self.given_up: list[Sequence] = []
        self._held = list(held)
        self._running = running
        self._idle: list[Sequence] | None = None  # who may give up, most junior last; sorted only when needed
        self._kept: set[int] = set()
        self._is_short = False

    def has_given_up(self, seq: Sequence) -> bool:
        """Whether a sequence makes room for another in this step."""
        return seq in self.given_up

    def is_held(self, seq: Sequence) -> bool:
        """Whether a session's KV is there for whoever continues it: nobody took it in this step."""
        return seq in self._held

    def admit(self, promised: KVUse, own: Sequence | None, *, keeps_own: bool) -> bool:
        """Whether ``promised``, for all that run and one more, fits; sessions give up for it.

        ``own`` is the session that the newcomer continues: with ``keeps_own`` its KV is in ``promised``.
        """
        held = [seq for seq in self._held if seq is not own]
        use = promised + _sum(held)
        num_dropped = 0
        while not self._budget.fits(use):
            if num_dropped == len(held):
                return False
            use -= use_of(held[num_dropped].kv_tokens)
            num_dropped += 1
        self._held = held
        self._give_up(held[:num_dropped])
        if own is not None and not keeps_own:
            self._give_up([own])
        return True

    def reserve(self, seq: Sequence, before: int, after: int) -> bool:
        """Whether a sequence with KV of ``before`` tokens gets what it needs for ``after``."""
        need = growth(before, after)
        if not self._budget.fits(self.used + need):
            leaving = None if self._is_short else self._enough(need, seq)
            if leaving is None:
                # The least anybody needs is one block, and juniors have fewer to take it from.
                self._is_short |= need == KVUse(0, 1)
                return False
            self._give_up(leaving)
        self.used += need
        self._kept.add(seq.seq_id)
        return True

    def _enough(self, need: KVUse, seq: Sequence) -> list[Sequence] | None:
        """The fewest, in order, whose KV makes room for ``need``; ``None`` if all together do not."""
        used, leaving = self.used, list[Sequence]()
        for one in self._may_give_up_for(seq):
            used -= use_of(one.kv_tokens)
            leaving.append(one)
            if self._budget.fits(used + need):
                return leaving
        return None

    def _may_give_up_for(self, seq: Sequence) -> Iterator[Sequence]:
        yield from self._held
        if self._idle is None:
            idle = (one for one in self._running if not one.num_in_flight and one.kv_tokens)
            self._idle = sorted(idle, key=lambda one: one.rank)
        for one in reversed(self._idle):
            if one.rank <= seq.rank:
                return
            # Who has been promised memory in this step was asked before, so it is senior; or it joins just now.
            if one.seq_id not in self._kept:
                yield one

    def _give_up(self, leaving: list[Sequence]) -> None:
        for seq in leaving:
            self.given_up.append(seq)
            self.used -= use_of(seq.kv_tokens)
            if seq in self._held:
                self._held.remove(seq)
            elif self._idle and seq in self._idle:
                self._idle.remove(seq)


def _sum(sequences: Iterable[Sequence]) -> KVUse:
    use = KVUse()
    for seq in sequences:
        use += use_of(seq.kv_tokens)
    return use
