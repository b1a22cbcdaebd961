"""Admission: which waiting requests begin to run, in the order of the queue, and with which stored KV.

A sequence begins when its whole prompt and the beginning of its answer fit beside what all others have or were
promised. Whoever could begin with blocks on disk waits for them; so does whoever lacks a block that another just
computes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from splitinfer.core.kv.block_tree import Key, Match
from splitinfer.core.kv.budget import BLOCK, NOTHING, KVUse, use_of
from splitinfer.core.scheduler.cost_model import Shape
from splitinfer.core.scheduler.decision import Admission, Decision
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AdmissionControl:
    """Reads a scheduler's state; writes nothing but the decision it is asked for."""

    state: SchedulerState

    def of(self, decision: Decision) -> Iterator[Admission]:
        """Who begins with this step: nobody passes one that does not fit, so all get in."""
        allocation, prefix_cache = decision.allocation, self.state.prefix_cache
        num_places = self.state.config.max_running - len(self.state.running) - prefix_cache.num_awaiting
        if not self.state.waiting or num_places <= 0:
            return
        promised, coming = NOTHING, set(prefix_cache.coming())
        for seq in self.state.running.values():
            promised += use_of(self._promise(seq))
            coming.update(self._coming(seq, len(seq.blocks)))
        for seq in self.state.waiting:
            if seq.awaits:
                promised += use_of(self._promise(seq))
                continue
            match = prefix_cache.match(seq).without(allocation.evicted)
            if self._comes_soon(seq, match, coming):
                continue
            promised += use_of(self._promise(seq))
            if num_places <= 0:
                return
            num_places -= 1
            if self._fetches_first(decision, seq, match, promised):
                coming.update(block.key for _, ahead in decision.fetching[-1:] for block in ahead)
                continue
            if not allocation.admit(promised, match.blocks):
                match = Match()  # where memory is that short, its blocks must go, too
                if not allocation.admit(promised, ()):
                    return
            coming.update(self._coming(seq, match.num_tokens // BLOCK))
            yield Admission(seq, match)

    def _fetches_first(self, decision: Decision, seq: Sequence, match: Match, promised: KVUse) -> bool:
        """Whether a sequence waits for blocks of the disk before it begins."""
        going = decision.allocation.evicted
        ahead = self.state.prefix_cache.ahead(seq, match, going)
        if not ahead or not self.reads_faster(ahead[-1].end):
            return False
        num_lacking = self.state.prefix_cache.num_lacking(ahead, going)
        if not num_lacking:
            return True  # they are on their way for another
        if not decision.allocation.fetch(promised, num_lacking, match.blocks):
            return False
        decision.fetching.append((seq, ahead))
        return True

    def reads_faster(self, num_tokens: int) -> bool:
        """Whether the first tokens of a sequence are read faster than computed, by what both have taken so far; where
        that is not known, reading finds out."""
        reading, rows = self.state.prefix_cache.seconds_per_token, self.state.config.token_budget
        if reading is None or not self.state.costs.trusted_rows:
            return True
        # A prompt's chunks go through the stages side by side, and so do fetches.
        chunk = Shape().plus(max(0, num_tokens - rows) // 2, rows)
        return reading < self.state.costs.slowest(chunk) / rows

    def _coming(self, seq: Sequence, num_stored: int) -> Iterable[Key]:
        """The blocks of its prompt that a sequence computes, and that will be stored."""
        return seq.keys[num_stored:] if seq.is_stored and seq not in self.state.batches else ()

    def _comes_soon(self, seq: Sequence, match: Match, coming: set[Key]) -> bool:
        """Whether another computes the block that a sequence lacks first."""
        at = match.num_tokens // BLOCK
        return at < len(seq.keys) and seq.keys[at] in coming

    def _promise(self, seq: Sequence) -> int:
        """Tokens of KV that are kept free for a sequence: all it has now and, before it decodes, a block more."""
        if seq in self.state.batches:
            return max(seq.kv_tokens, len(seq.tokens))
        return max(seq.kv_tokens, min(len(seq.tokens) + BLOCK, self.state.config.longest(seq)))
