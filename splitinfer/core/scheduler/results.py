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
from splitinfer.core.speculation.speculation import Speculation


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
        state.groups.returned(step.plan)
        if state.speculation is not None:
            state.speculation.returned(step.plan, result, returned_at)
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
        """Append what was sampled for a slice, unless that is void."""
        events: list[TokenEvent] = []
        if part.num_drafts and part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
            if self._state.speculation is not None:
                self._state.speculation.counts.void += 1
            return events
        seq.num_awaited -= 1
        first, verdicts = len(seq.tokens), list[tuple[int, bool]]()
        for row, token in enumerate(tokens):
            misses, is_tried, is_forced = seq.num_misses, bool(seq.ahead), first + row in seq.forced
            reason = seq.append(token.token_id, self._state.config.max_len)
            seq.token_at = self._state.now
            seq.num_forced += is_tried and is_forced
            if is_tried and not is_forced:
                verdicts.append((row, seq.num_misses == misses))
            events.append(TokenEvent(seq.seq_id, token, reason))
            if reason is not None:
                break
        if self._state.speculation is not None:
            self._judge(seq, self._state.speculation, part, first, verdicts)
        if events and (end := events[-1].finish_reason) is not None:
            self._life.end(seq, end)
        elif self._state.speculation is not None:
            self._goes_on(seq, self._state.speculation, verdicts)
        return events

    def _judge(
        self, seq: Sequence, speculation: Speculation, part: Slice, first: int, verdicts: list[tuple[int, bool]]
    ) -> None:
        """Count the verdicts on a slice's drafts: by row, whether the draft behind it was right."""
        if verdicts:
            right = sum(is_right for _, is_right in verdicts)
            seq.num_tried, seq.num_right = seq.num_tried + len(verdicts), seq.num_right + right
            if right < len(verdicts):
                self._missed.add(seq.seq_id)
            speculation.judged(seq.seq_id, part, first, verdicts)

    def _goes_on(self, seq: Sequence, speculation: Speculation, verdicts: list[tuple[int, bool]]) -> None:
        """Learn from the verdicts on a sequence's drafts, and store the blocks of KV that only it has completed."""
        if verdicts:
            speculation.controller.tried(seq.seq_id, len(verdicts), sum(is_right for _, is_right in verdicts))
        if speculation.has_states and seq.has_drafted and not seq.num_awaited:
            self._state.prefix_cache.store_full_blocks(seq, self._state.used)  # the state is that at their end only now

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
        if not _answers(part, found, running.get(part.seq_id)):
            raise _wrong(result, oldest.plan)
        if found is not None:
            _check_extras(part, found, result.step)
    if got:
        raise _wrong(result, oldest.plan)
    return oldest


def _wrong(result: StepResult, plan: StepPlan) -> ValueError:
    rows = {part.seq_id: part.num_logits for part in plan.slices if part.num_rows}
    counts = {one.seq_id: len(one.tokens) for one in result.sampled}
    return ValueError(f"step {result.step} asked for {rows} tokens by sequence and got {counts}")


def _check_extras(part: Slice, found: SampledSlice, step: int) -> None:
    """Check what came besides sampled tokens."""
    if len(found.drafts) > part.num_next:
        raise ValueError(f"step {step} has more drafts than it asked for")
    if tuple(token.token_id for token in found.scored) != part.scored:
        raise ValueError(f"step {step} has log probabilities of other tokens than those it asked for")


def _answers(part: Slice, found: SampledSlice | None, seq: Sequence | None) -> bool:
    """Whether the tokens received for a slice of ``seq`` are possible for its rows and drafts. ``None``: none came,
    because it wants none, or a stage in the middle has left it out, or its sequence has ended."""
    tokens = () if found is None else found.tokens
    if not part.num_drafts:
        return len(tokens) == part.num_logits and (found is not None or not part.num_rows)
    if seq is None and part.begins_with_draft:
        return True  # the sequence has ended: whether this slice was void is no longer known
    if seq is not None and part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
        return not tokens
    return part.is_verdict([token.token_id for token in tokens])
