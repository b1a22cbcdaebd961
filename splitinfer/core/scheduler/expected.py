"""The step that follows if a result is as expected, planned while that result travels.

While all that runs decodes and nothing waits, the next step of a group is its last one, one position on, and all that
is not known of it is its tokens. Whoever waits for the result can then launch that step first, and have the scheduler
take in the result and plan the same step while the device computes.

    result ─▶ update ─▶ schedule ─▶ launch        becomes        result ─▶ launch ─▶ update ─▶ schedule

Nothing is expected where anything else could be in the next plan: a prompt, a draft, a mask, a block to be stored, a
sequence that may end with this token or be moved to another group. The result's figures cannot change it: costs are
learned, and groups chosen by them, when there is time (``Scheduler.learn``). Policies and objectives matter to prompts
alone, deadlines between two turns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from splitinfer.core.kv.budget import NOTHING, KVUse
from splitinfer.core.plan import SampledSlice, Slice, StepPlan, StepResult
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Expected:
    """The ``plan`` that follows on the result of step ``step``, but for its tokens. ``ends``: of each slice's sequence,
    the tokens that would end it. It holds until the scheduler hears of anything but that result."""

    step: int
    plan: StepPlan
    ends: tuple[frozenset[int], ...]

    def filled(self, result: StepResult) -> StepPlan | None:
        """The plan with the tokens of a result, which has the figures of all stages; ``None`` if that is not as
        expected."""
        is_expected = result.step == self.step and len(result.sampled) == len(self.plan.slices)
        if not is_expected or any(each.written or each.lacking for each in result.figures):
            return None
        slices = list[Slice]()
        for part, ends, found in zip(self.plan.slices, self.ends, result.sampled, strict=True):
            if not _is_next(found, part, ends):
                return None
            slices.append(Slice(part.seq_id, part.start, (found.tokens[0].token_id,), 1))
        return StepPlan(self.plan.step, slices=tuple(slices))


def _is_next(found: SampledSlice, part: Slice, ends: frozenset[int]) -> bool:
    if found.seq_id != part.seq_id or len(found.tokens) != 1 or found.drafts or found.scored:
        return False
    return found.tokens[0].token_id not in ends


def expected(state: SchedulerState, next_step: int) -> Expected | None:
    """What follows on the oldest step in flight; ``None`` where that is not certain."""
    oldest = state.in_flight[0] if state.in_flight else None
    if oldest is None or not _only_decodes(state):
        return None
    slices = oldest.plan.following
    members = [state.running[part.seq_id] for part in slices if part.seq_id in state.running]
    if not members or len(members) != len(slices) or not _go_on(state, members):
        return None
    return Expected(oldest.plan.step, StepPlan(next_step, slices=slices), tuple(seq.end_tokens for seq in members))


def _only_decodes(state: SchedulerState) -> bool:
    """Whether all that runs waits for its next token, and nothing else is to be done."""
    if state.config.speculates or state.waiting or state.has_changes or len(state.batches) != len(state.running):
        return False
    return all(seq.num_awaited == 1 and seq.rules is None for seq in state.running.values())


def _go_on(state: SchedulerState, members: list[Sequence]) -> bool:
    """Whether these sequences, and no other, are in the step after their next token."""
    config = state.config
    if not all(len(seq.tokens) + 1 < config.longest(seq) and not seq.params.stop for seq in members):
        return False
    if len(members) > config.token_budget or len(state.in_flight) > min(config.max_in_flight, config.num_groups):
        return False
    return _stay(state, members) and state.budget.fits(state.used + state.prefix_cache.use + _growth(state, members))


def _stay(state: SchedulerState, members: list[Sequence]) -> bool:
    """Whether these are a group, in its order, and neither it nor the number of groups changes with their token."""
    if len(state.batches) > 1 and state.groups.is_due(frozenset(state.running)):
        return False
    return state.batches.is_settled(members)


def _growth(state: SchedulerState, members: Iterable[Sequence]) -> KVUse:
    return sum((state.budget.growth(seq.kv_tokens, len(seq.tokens) + 1) for seq in members), NOTHING)
