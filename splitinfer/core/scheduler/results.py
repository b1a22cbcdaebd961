"""What a result does: its tokens are appended, drafts come to their verdict, and what lies behind a wrong one is void.

The pipeline keeps order, so a result that does not answer the oldest plan comes from a broken peer (``check_result``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.lifecycle import Lifecycle
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a sequence; ``finish_reason`` is set if the sequence ends with it."""

    seq_id: int
    token: SampledToken
    finish_reason: FinishReason | None


class Results:
    """Takes in the results of a scheduler's plans."""

    def __init__(self, state: SchedulerState, life: Lifecycle) -> None:
        self._state, self._life = state, life
        self._missed: set[int] = set()  # sequences with wrong drafts in the last result

    def take(self, result: StepResult, returned_at: float) -> tuple[StepInFlight, list[TokenEvent]]:
        """Take the result of the oldest step in flight; returns that step and its tokens. ``returned_at``: when it
        came, in seconds on the first stage's clock.

        Raises:
            ValueError: the result does not answer that step.
        """
        state = self._state
        step = check_result(result, next(iter(state.in_flight), None), state.running)
        state.in_flight.popleft()
        state.now, state.returned_at = max(state.now, returned_at), returned_at
        events = self._tokens(step.plan, result)
        state.prefix_cache.learn(step.plan, result.figures)
        state.chooser.returned(step.plan)
        if state.speculation is not None:
            state.speculation.returned(step.plan, result)
        return step, events

    def _tokens(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Append what was sampled for a plan."""
        sampled = {s.seq_id: s for s in result.sampled}
        drafts = {s.seq_id: s.drafts for s in result.sampled if s.drafts and s.tokens}
        self._missed = set()
        events: list[TokenEvent] = []
        decoding: list[Sequence] = []
        for part in plan.slices:
            seq = self._state.running.get(part.seq_id)
            if seq is None:
                continue  # it ended while this step was under way
            seq.num_in_flight -= 1
            found = sampled.get(part.seq_id, SampledSlice(part.seq_id, ()))
            if found.scored:
                seq.scores += found.scored[len(seq.scores) - part.start :]  # it may have begun before the first of them
            events += self._append(seq, part, found.tokens)
            if part.seq_id in drafts and seq.finish_reason is None and self._state.speculation is not None:
                self._state.speculation.propose(seq, drafts[part.seq_id], self._state.config.longest(seq))
            if part.num_logits and seq.finish_reason is None:
                decoding.append(seq)
        self._state.batches.join_new(decoding)  # after those that end have left, so that groups stay equal
        return events

    def _append(self, seq: Sequence, part: Slice, tokens: tuple[SampledToken, ...]) -> list[TokenEvent]:
        """Append what was sampled for a slice."""
        speculation = self._state.speculation
        if part.num_drafts and not tokens:  # it is void
            if speculation is not None:
                speculation.counts.void += 1
            return []
        found = seq.extend([token.token_id for token in tokens], self._state.config.max_len, self._state.now)
        if found.verdicts and speculation is not None:
            speculation.judged(seq.seq_id, part, found)
            if found.num_right < len(found.verdicts):
                self._missed.add(seq.seq_id)
        events = [TokenEvent(seq.seq_id, token, None) for token in tokens[: len(seq.tokens) - found.first]]
        if found.reason is not None:
            events[-1] = replace(events[-1], finish_reason=found.reason)
            self._life.end(seq, found.reason)
        elif speculation is not None and speculation.has_states and seq.drafts.were_planned and not seq.num_awaited:
            self._state.prefix_cache.store_full_blocks(seq, self._state.used)  # the state is that at their end only now
        return events

    def leave_out_void(self) -> None:
        """Leave what results have voided out of the steps that have not left the first stage."""
        for step in self._state.in_flight:
            if not step.is_sent and any(part.begins_with_draft and self._is_void(part) for part in step.plan.slices):
                self._leave_out(step)

    def _leave_out(self, step: StepInFlight) -> None:
        void = [part for part in step.plan.slices if part.begins_with_draft and self._is_void(part)]
        for part in void:
            self._state.running[part.seq_id].num_in_flight -= 1
            if self._state.speculation is not None:
                self._state.speculation.counts.unsent += 1
        step.plan = replace(step.plan, slices=tuple(part for part in step.plan.slices if part not in void))
        self._state.batches.balance()  # a sequence without a step under way may move

    def void_slices(self) -> tuple[tuple[int, int], ...]:
        """Return the slices under way that the last result has made void, as (step, sequence); call it after each."""
        missed, self._missed = self._missed, set()
        return tuple(
            (step.plan.step, part.seq_id)
            for step in self._state.in_flight
            for part in step.plan.slices
            if part.seq_id in missed and part.begins_with_draft and self._is_void(part)
        )

    def _is_void(self, part: Slice) -> bool:
        seq = self._state.running.get(part.seq_id)
        return seq is not None and not seq.num_awaited


def check_result(result: StepResult, oldest: StepInFlight | None, running: Mapping[int, Sequence]) -> StepInFlight:
    """Return the step that ``result`` answers, which must be the ``oldest`` in flight.

    Raises:
        ValueError: it is another step's result, or has tokens that the plan's slices did not ask for.
    """
    if oldest is None or result.step != oldest.plan.step:
        expected = None if oldest is None else oldest.plan.step
        raise ValueError(f"the result of step {result.step} came where that of step {expected} was due")
    got = {one.seq_id: one for one in result.sampled}
    for part in oldest.plan.slices:
        found = got.pop(part.seq_id, None) if part.num_rows else None
        seq = running.get(part.seq_id)
        if not part.is_answered_by(found, None if seq is None else seq.tokens):
            raise _wrong(result, oldest.plan)
    if got:
        raise _wrong(result, oldest.plan)
    return oldest


def _wrong(result: StepResult, plan: StepPlan) -> ValueError:
    asked = {part.seq_id: (part.num_logits, part.num_next, len(part.scored)) for part in plan.slices if part.num_rows}
    got = {one.seq_id: (len(one.tokens), len(one.drafts), len(one.scored)) for one in result.sampled}
    return ValueError(f"step {result.step} asked for {asked} tokens, drafts and scores by sequence and got {got}")
