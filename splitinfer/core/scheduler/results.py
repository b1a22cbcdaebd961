"""What a result may be, and what it brings.

The pipeline keeps order, so a result that does not answer the oldest plan comes from a broken peer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from splitinfer.core.plan import SampledToken, StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a sequence; ``finish_reason`` is set if the sequence ends with it."""

    seq_id: int
    token: SampledToken
    finish_reason: FinishReason | None


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
