"""Admission: which waiting sequences start to run, in the order of the queue, and with which stored KV.

A sequence is admitted when its whole prompt and the beginning of its answer fit beside what all others have or have
reserved. It begins with the stored blocks that it matches; where there is no room for both, it takes them over, that
is, the plan that begins it drops them. A sequence whose prefix continues with blocks on disk waits until they are read,
if reading is faster than computing; a sequence whose next block is just being computed by another waits for that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.block_tree import Key, Match
from splitinfer.core.kv.budget import NOTHING, KVUse
from splitinfer.core.scheduler.decision import Admission, Decision
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence

MAX_PREFIXES = 1 << 20  # tokens of stored prefixes in a plan, which has them all; a stage takes 8 MiB for damage


@dataclass(frozen=True, slots=True)
class AdmissionControl:
    """Admits sequences into a decision. Reads a scheduler's state and changes nothing but that decision."""

    state: SchedulerState

    def of(self, decision: Decision) -> Iterator[Admission]:
        """The sequences that start with this step. None overtakes one that does not fit, so none starves."""
        allocation, prefix_cache = decision.allocation, self.state.prefix_cache
        num_places = self.state.config.max_running - len(self.state.running) - prefix_cache.num_awaiting
        if not self.state.waiting or num_places <= 0:
            return
        (reserved, coming), told = self._of_those_running(), 0
        for seq in self.state.waiting:
            if seq.kv.awaits:
                reserved += self.state.budget.use_of(self.reservation(seq))
                continue
            match = prefix_cache.match(seq).without(allocation.evicted)
            if self._is_being_computed(seq, match, coming):
                continue
            if told and told + match.num_tokens > MAX_PREFIXES:
                return  # the next plan has room for it
            told += match.num_tokens
            reserved += self.state.budget.use_of(self.reservation(seq))
            if num_places <= 0:
                return
            num_places -= 1
            if self._fetches_first(decision, seq, match, reserved):
                coming.update(block.key for _, ahead in decision.fetching[-1:] for block in ahead)
                continue
            # Where memory is so short that its own blocks must be evicted, too, it takes them over.
            if not allocation.admit(reserved, match.blocks) and not allocation.admit(reserved, ()):
                return
            coming.update(self._keys_to_store(seq, match.num_tokens // self.state.budget.block))
            yield Admission(seq, match)

    def _of_those_running(self) -> tuple[KVUse, set[Key]]:
        """What they have reserved, and the keys of the blocks that they compute and that are read for others."""
        reserved, coming = NOTHING, set(self.state.prefix_cache.coming())
        for seq in self.state.running.values():
            reserved += self.state.budget.use_of(self.reservation(seq))
            coming.update(self._keys_to_store(seq, len(seq.kv.blocks)))
        return reserved, coming

    def _fetches_first(self, decision: Decision, seq: Sequence, match: Match, reserved: KVUse) -> bool:
        """Whether a sequence waits for blocks on disk; those still to be read are added to the decision."""
        evicted = decision.allocation.evicted
        ahead = self.state.prefix_cache.ahead(seq, match, evicted)
        if not ahead or not self.reads_faster(ahead[-1].end):
            return False
        num_lacking = self.state.prefix_cache.num_lacking(ahead, evicted)
        if not num_lacking:
            return True  # they are being read for another sequence
        if not decision.allocation.fetch(reserved, num_lacking, match.blocks):
            return False
        decision.fetching.append((seq, ahead))
        return True

    def reads_faster(self, num_tokens: int) -> bool:
        """Whether reading a sequence's first ``num_tokens`` from disk is faster than computing them, by the times
        measured so far; True where there are none yet, so that reading gets measured."""
        reading, rows = self.state.prefix_cache.seconds_per_token, self.state.config.token_budget
        if reading is None or not self.state.costs.trusted_rows:
            return True
        # Chunks of a prompt are computed on all stages at once, and blocks are read on all at once.
        chunk = Shape().plus(max(0, num_tokens - rows) // 2, rows)
        return reading < self.state.costs.slowest(chunk) / rows

    def _keys_to_store(self, seq: Sequence, num_stored: int) -> Iterable[Key]:
        """The keys of the prompt blocks that a sequence computes and that will then be stored."""
        return seq.keys[num_stored:] if seq.kv.is_stored and seq not in self.state.batches else ()

    def _is_being_computed(self, seq: Sequence, match: Match, coming: set[Key]) -> bool:
        """Whether the first block that a sequence lacks is being computed or read for another."""
        at = match.num_tokens // self.state.budget.block
        return at < len(seq.keys) and seq.keys[at] in coming and not seq.num_to_score

    def reservation(self, seq: Sequence) -> int:
        """Tokens of KV reserved for a sequence: those it has now and, before it decodes, one block more."""
        if seq in self.state.batches:
            return max(seq.kv_tokens, len(seq.tokens))
        return max(seq.kv_tokens, min(len(seq.tokens) + self.state.budget.block, self.state.config.longest(seq)))
