"""Where a sequence is, and its KV with it: it waits, runs, waits again if it is preempted, and ends."""

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
        self._state.used += self._state.budget.use_of(match.num_tokens)
        seq.is_known = True
        blocks, prefix = tuple(block.block_id for block in match.blocks), seq.sent(0, match.num_tokens)
        params, num_prompt = seq.params.for_stages, seq.num_prompt_tokens
        return NewSequence(seq.seq_id, params, seq.seed, blocks, prefix, num_prompt, seq.pictures)

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
        if self._state.speculation is not None and self._state.speculation.has_states and seq.has_drafted:
            self._state.prefix_cache.keep_no_more(seq)  # its state may be one behind its last token
        if reason is not FinishReason.ERROR:
            self._store_rest(seq)
        self._release(seq)

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
