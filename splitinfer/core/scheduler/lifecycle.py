"""Where a sequence is, and its KV with it: it waits, runs, waits again if it is preempted, and ends.

When a sequence ends alone its KV is *left* on the stages, beside the blocks that are stored of it: most often, what
comes next is the next turn of its conversation, which takes the arrays over and copies nothing. Whatever else begins
frees them, so they never take memory from anybody.
"""

from splitinfer.core.kv.rewind import UNLIMITED
from splitinfer.core.plan import NewSequence
from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.scheduler.decision import Admission
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.scheduler.waiting_queue import Deadlines
from splitinfer.core.sequence import FinishReason, Sequence


class Lifecycle:
    """Moves sequences. ``deadlines``: of all that have not ended; ``num_preemptions``: times a running sequence was
    preempted."""

    def __init__(self, state: SchedulerState, admission: AdmissionControl) -> None:
        self._state, self._admission = state, admission
        self.deadlines, self.num_preemptions = Deadlines(), 0

    def preempt(self, seq: Sequence) -> None:
        """Free a running sequence's KV and queue it again, with its tokens."""
        del self._state.running[seq.seq_id]
        self._state.batches.leave(seq)
        if self._state.config.rewind is UNLIMITED and self._admission.reads_faster(seq.num_sure):
            self._state.prefix_cache.swap_out(seq)
        self._release(seq)
        self.forget_drafts(seq)
        seq.forget_stages()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._state.waiting.add(seq)

    def admit(self, new: Admission) -> NewSequence:
        """Have a waiting sequence run, with the stored blocks that it begins with; returns what the stages are told."""
        seq, match = new.seq, new.match
        self._state.waiting.remove(seq)
        self._state.running[seq.seq_id] = seq
        seq.num_scheduled = match.num_tokens
        seq.num_cached = match.num_tokens if seq.num_cached is None else seq.num_cached
        seq.comes_back |= match.is_everything
        self._state.prefix_cache.begin(seq, match)
        seq.is_known = True
        left = self._state.left_for(new)
        if left is not None:  # it goes on in those arrays, which stay as long as they are
            seq.kv_floor, self._state.left = left.kv_tokens, None
        self._state.used += self._state.budget.use_of(seq.kv_tokens)
        blocks, prefix = tuple(block.block_id for block in match.blocks), seq.sent(0, match.num_tokens)
        params, num_prompt = seq.params.for_stages, seq.num_prompt_tokens
        takes_over = None if left is None else left.seq_id
        return NewSequence(seq.seq_id, params, seq.seed, blocks, prefix, num_prompt, seq.pictures, takes_over)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that waits or runs. Its slices under way still run and are ignored."""
        seq.finish_reason = reason
        self.forget_drafts(seq)
        self.deadlines.remove(seq)
        if self._state.waiting.get(seq.seq_id) is seq:
            self._state.waiting.remove(seq)
            self._state.prefix_cache.leave(seq)
            return
        del self._state.running[seq.seq_id]
        self._state.batches.leave(seq)
        if self._state.speculation is not None and self._state.speculation.has_states and seq.drafts.were_planned:
            self._state.prefix_cache.keep_no_more(seq)  # its state may be one behind its last token
        if reason is not FinishReason.ERROR:
            self._store_rest(seq)
            if self._can_be_left(seq):
                self._leave(seq)
                return
        self._release(seq)

    def _can_be_left(self, seq: Sequence) -> bool:
        """Whether the KV of a sequence that ends may stay: where it was alone, there is room for it beside all blocks,
        and it can go back to their end."""
        config, blocks = self._state.config, self._state.prefix_cache
        if self._state.running or self._state.waiting or config.drafts_at_end or not seq.kv.blocks:
            return False
        if not self._state.goes_back and (seq.drafts.were_planned or seq.num_in_flight):
            return False
        return self._state.budget.fits(self._state.budget.use_of(seq.kv_tokens) + blocks.use)

    def _leave(self, seq: Sequence) -> None:
        self._state.used -= self._state.budget.use_of(seq.kv_tokens)
        self._state.left = seq
        self._state.newly_left.append(seq.seq_id)

    def free_left(self) -> None:
        """Have the next plan free the KV that is left, if there is some."""
        left, self._state.left = self._state.left, None
        if left is not None:
            self._state.newly_left.clear()
            self._state.freed.append(left.seq_id)

    def _store_rest(self, seq: Sequence) -> None:
        """Its KV is freed by the plan that stores it, so the blocks may take its place."""
        used = self._state.used - self._state.budget.use_of(seq.kv_tokens)
        self._state.prefix_cache.store_rest(seq, used, again=self._state.config.rewind is UNLIMITED)

    def forget_drafts(self, seq: Sequence) -> None:
        """Forget what was drafted for a sequence, and how."""
        if self._state.speculation is not None:
            self._state.speculation.forget(seq)

    def _release(self, seq: Sequence) -> None:
        """Have the next plan free a sequence's KV."""
        self._state.used -= self._state.budget.use_of(seq.kv_tokens)
        self._state.freed.append(seq.seq_id)
