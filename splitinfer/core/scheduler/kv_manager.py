"""Grants KV memory to sequences: which may start, how much a step may add, and which gives way if memory is short.

A sequence is admitted when its whole prompt and the beginning of its answer fit beside the KV that all others have or
have reserved. It begins with the stored blocks that match it (``core.kv.prefix_cache``); if both do not fit, the plan
that begins it drops those blocks. If its prefix continues with blocks on disk, it waits until they are read, unless
computing them is faster. If another sequence is computing its next block, it waits for that.

If a sequence's KV must grow and memory is short, in this order:

    1. stored blocks are evicted, the least recently used first and open conversations' last, except blocks that
       sequences of this step begin with
    2. of the running sequences that rank below this one and are not in flight, the lowest is preempted
    3. otherwise the sequence keeps its KV as it stands, and continues when others have ended

Rank is priority, then order of arrival. So the highest-ranked sequence always continues once results are back, and two
sequences never take memory from each other in turn. KV *promised* to the sequences of a step counts as taken until the
step is made, also the KV that decodes of other groups need next.

When a sequence ends alone, its KV is *retained* on the stages, beside its stored blocks: the next turn of its
conversation takes over the arrays. Any other sequence that begins frees them.
"""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.block_tree import Block, DiskBlock, Key, Match
from splitinfer.core.kv.budget import NOTHING, KVBudget, KVUse
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.kv.rewind import UNLIMITED, WITHIN_DRAFTS
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.sequence import FinishReason, Sequence

MAX_PREFIXES = 1 << 20  # tokens of all stored prefixes in a plan; stages reject a plan of more than 8 MiB

Admission = tuple[Sequence, Match]


class KVManager:
    """Grants the stages' KV memory. ``cache``: the stored blocks and the whole budget; ``used``: the KV of all running
    sequences; ``retained``: the sequence that ended last, alone, as long as no other begins; ``freed``: ids of the
    sequences whose KV the next plan frees."""

    def __init__(self, config: SchedulerConfig, costs: CostModel, batches: MicroBatches) -> None:
        self.cache = PrefixCache(config.blocks, config.kv or KVBudget())
        self.used = NOTHING
        self.retained: Sequence | None = None
        self._config, self._costs, self._batches = config, costs, batches
        self._can_roll_back = config.rewind is UNLIMITED and not config.blocks.whole_blocks  # to any token
        self.freed = list[int]()
        self._newly_retained = list[int]()  # ids, for the next plan
        self.begin_step()

    @property
    def budget(self) -> KVBudget:
        """The memory of sequences and stored blocks: the configured budget, or less after ``lower``."""
        return self.cache.budget

    @property
    def stored(self) -> KVUse:
        """The KV kept for later sequences: all cached blocks and the retained sequence."""
        kept = NOTHING if self.retained is None else self.budget.use_of(self.retained.kv_tokens)
        return self.cache.use + kept

    @property
    def has_changes(self) -> bool:
        """Whether the stages have something to do even without slices."""
        return bool(self.freed or self._newly_retained) or self.cache.has_changes

    # -- room for a step -----------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step: drop all promises of the last one."""
        self._promised = NOTHING
        self._granted = set[int]()
        self._pinned = set[Block]()  # blocks that sequences of this step begin with
        self._is_short = False

    def allocate(self, seq: Sequence, end: int, running: Iterable[Sequence]) -> list[Sequence] | None:
        """Promise a sequence KV for ``end`` tokens. Return the sequences that must be preempted for it at once. Return
        None, and change nothing, if there is no room."""
        need, victims = self.budget.growth(seq.kv_tokens, end), list[Sequence]()
        if need is not NOTHING:
            found = victims if self._has_room(need) else self._make_room(need, seq, running)
            if found is None:
                return None
            victims = found
            self._promised += need
        self._granted.add(seq.seq_id)
        return victims

    def allocate_spare(self, before: int, end: int, reserve: KVUse = NOTHING) -> bool:
        """Promise KV for ``end`` tokens to a sequence that has KV for ``before``, if that fits beside ``reserve``
        without eviction or preemption. Return whether it does."""
        need = self.budget.growth(before, end)
        if need is NOTHING:
            return True
        if not self._has_room(need + reserve):
            return False
        self._promised += need
        return True

    def _has_room(self, need: KVUse) -> bool:
        return self.budget.fits(self.used + self._promised + self.cache.use + need)

    def _make_room(self, need: KVUse, seq: Sequence, running: Iterable[Sequence]) -> list[Sequence] | None:
        if self._is_short:
            return None
        # Sequences with KV granted in this step rank higher, or are just being admitted.
        idle = [one for one in running if one.kv_tokens and not one.num_in_flight and one.seq_id not in self._granted]
        later = [one for one in idle if one.precedence > seq.precedence]
        victims = sorted(later, key=lambda one: one.precedence, reverse=True)
        found = self.cache.make_room(self.used + self._promised + self.cache.use + need, self._pinned, victims)
        # One block is the least that a sequence needs, and lower-ranked sequences have fewer victims.
        self._is_short = found is None and need == KVUse(0, self.budget.block)
        return found

    # -- admission -----------------------------------------------------------------------------

    def admissible(
        self, waiting: Iterable[Sequence], running: Collection[Sequence], most: int, rows: int
    ) -> Iterator[Admission]:
        """Yield the ``waiting`` sequences that may start with this step, with their matches, so that at most
        ``most`` run. A sequence never overtakes one that does not fit, so no sequence starves. ``rows``: see
        ``reads_faster``."""
        num_places = most - len(running) - len(self.cache.awaiting)
        if num_places <= 0:
            return
        use_of, reserved, coming, told = self.budget.use_of, NOTHING, set(self.cache.coming()), 0
        for seq in running:
            reserved += use_of(self.reservation(seq))
            coming.update(self._keys_to_store(seq, len(seq.kv.blocks)))
        for seq in waiting:
            if seq.kv.awaits:
                reserved += use_of(self.reservation(seq))
                continue
            if not seq.num_to_score and self.cache.first_lacking(seq) in coming:
                continue  # the first block that it lacks is being computed or read for another
            match = self.cache.match(seq)
            if told and told + match.num_tokens > MAX_PREFIXES:
                return  # the next plan has room for it
            told += match.num_tokens
            reserved += use_of(self.reservation(seq))
            if num_places <= 0:
                return
            num_places -= 1
            if self._fetches_first(seq, match, reserved, rows):
                coming.update(self.cache.coming())
                continue
            # If memory is so short that its own blocks must be evicted, it takes them over.
            if not self._reserve(reserved, match.blocks) and not self._reserve(reserved, ()):
                return
            coming.update(self._keys_to_store(seq, match.num_tokens // self.budget.block))
            yield seq, match

    def _reserve(self, reserved: KVUse, begins_with: Iterable[Block], num_fetched: int = 0) -> bool:
        """Return whether there is room for the ``reserved`` KV of all running sequences and one more, and for the
        blocks being fetched. Evict stored blocks for it, except blocks that the new sequence ``begins_with``."""
        pinned = self._pinned | set(begins_with)
        if self.cache.make_room(reserved + self.cache.use + KVUse(stored=num_fetched), pinned) is None:
            return False
        self._pinned = pinned
        return True

    def reservation(self, seq: Sequence) -> int:
        """Return the tokens of KV reserved for a sequence: its present tokens and, before it decodes, one more
        block."""
        if seq in self._batches:
            return max(seq.kv_tokens, len(seq.tokens))
        return max(seq.kv_tokens, min(len(seq.tokens) + self.budget.block, self._config.longest(seq)))

    def reads_faster(self, num_tokens: int, rows: int) -> bool:
        """Return whether reading a sequence's first ``num_tokens`` from disk is faster than computing them in chunks of
        ``rows``, by the times measured so far. True before any measurement, so that reading gets measured."""
        reading = self.cache.seconds_per_token
        if reading is None or not self._costs.trusted_rows:
            return True
        # All stages compute chunks of a prompt at the same time, and all read blocks at the same time.
        chunk = Shape().plus(max(0, num_tokens - rows) // 2, rows)
        return reading < self._costs.slowest(chunk) / rows

    def _fetches_first(self, seq: Sequence, match: Match, reserved: KVUse, rows: int) -> bool:
        """Return whether a sequence waits for blocks on disk. Request the blocks that are not being read yet."""
        ahead = self.cache.ahead(seq, match)
        if not ahead or not self.reads_faster(ahead[-1].end, rows):
            return False
        num_lacking = self.cache.num_lacking(ahead)
        if num_lacking and not self._reserve(reserved, match.blocks, num_lacking):
            return False
        if num_lacking:  # else they are being read for another sequence
            self.cache.fetch(seq, ahead)
        return True

    def _keys_to_store(self, seq: Sequence, num_stored: int) -> Seq[Key]:
        """Return the keys of the prompt blocks that a sequence will compute and store."""
        return seq.keys[num_stored:] if seq.kv.is_stored and seq not in self._batches else ()

    # -- what happens to sequences -------------------------------------------------------------

    def begin(self, seq: Sequence, match: Match) -> int | None:
        """Start a sequence with the stored KV that matches it. Return the id of the sequence whose arrays it takes
        over, if any."""
        before = self.retained_for(seq, match)
        seq.begin(match.num_tokens, 0 if before is None else before.kv_tokens)
        self.cache.begin(seq, match)
        self.used += self.budget.use_of(seq.kv_tokens)
        if before is None:
            return None
        self.retained = None  # its arrays keep their length
        return before.seq_id

    def retained_for(self, seq: Sequence, match: Match) -> Sequence | None:
        """Return the retained sequence if its KV covers the tokens that ``seq`` need not compute and can be rolled back
        to their end. It must not have more room than the tokens of ``seq``."""
        kept, end = self.retained, match.num_tokens
        if kept is None or not 0 < end <= kept.num_sure or kept.kv_tokens > len(seq.tokens):
            return None
        is_at_end = end == kept.num_scheduled
        return kept if (is_at_end or self._can_roll_back) and kept.tokens[:end] == seq.tokens[:end] else None

    def preempt(self, seq: Sequence, rows: int) -> None:
        """Make the next plan free a running sequence's KV. If reading is faster than computing, it first writes the
        sequence's blocks to disk. ``rows``: see ``reads_faster``."""
        if self._config.rewind is UNLIMITED and self.reads_faster(seq.num_sure, rows):
            self.cache.swap_out(seq)
        self.used -= self.budget.use_of(seq.kv_tokens)
        self.freed.append(seq.seq_id)

    def end(self, seq: Sequence, *, is_alone: bool) -> None:
        """Store the blocks of a running sequence that has ended, and make the next plan free or retain its KV.
        ``is_alone``: whether no other sequence runs or waits."""
        # Its KV is freed by the plan that stores it, so the blocks may take its place.
        self.used -= self.budget.use_of(seq.kv_tokens)
        if self._config.rewind == WITHIN_DRAFTS and seq.drafts.were_planned:
            seq.kv.is_stored = False  # its state may lag one token behind
        if seq.finish_reason is not FinishReason.ERROR:
            self.cache.store_rest(seq, self.used, again=self._config.rewind is UNLIMITED)
            if is_alone and self._can_be_retained(seq):
                self.retained = seq
                self._newly_retained.append(seq.seq_id)
                return
        self.freed.append(seq.seq_id)

    def _can_be_retained(self, seq: Sequence) -> bool:
        """Return whether the KV of a sequence that ends alone may stay: it fits beside all blocks and can be rolled
        back to their end."""
        if self._config.drafts_at_end or not seq.kv.blocks:
            return False
        if not self._can_roll_back and (seq.drafts.were_planned or seq.num_in_flight):
            return False
        return self.budget.fits(self.budget.use_of(seq.kv_tokens) + self.cache.use)

    def free_retained(self) -> None:
        """Make the next plan free any retained KV."""
        kept, self.retained = self.retained, None
        if kept is not None:
            self._newly_retained.clear()
            self.freed.append(kept.seq_id)

    def take_ended(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return and clear the ids of the sequences that the next plan frees, and of the ones that it retains."""
        freed, retained = tuple(self.freed), tuple(self._newly_retained)
        self.freed.clear()
        self._newly_retained.clear()
        return freed, retained

    def forget(self, session: str) -> None:
        """Free the KV that a session keeps, except blocks that other sequences' blocks follow."""
        self.cache.forget(session)
        if self.retained is not None and self.retained.session == session:
            self.free_retained()

    def clear(self, kept: Iterable[DiskBlock]) -> None:
        """Start again after the stages have lost everything except the blocks ``kept`` on disk."""
        self.take_ended()
        self.used, self.retained = NOTHING, None
        self.cache.clear(kept)

    def lower(self, stage: int) -> bool:
        """Lower the budget of a stage whose device ran out of memory. Return whether the budget changed."""
        before = self.budget
        self.cache.budget = before.lowered(stage, self.used + self.stored)
        return self.budget != before
