"""Steps in flight, and the check of their results. The coordinator has one record for each step, from plan to result,
which all its parts share. The pipeline keeps order, so a result that does not answer the oldest plan comes from a
broken peer."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from splitinfer.core.plan import SampledToken, StageFigures, StepPlan, StepResult
from splitinfer.core.sequence import FinishReason, Sequence


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step between its plan and its result. Each field has one writer. Times are seconds on the first stage's clock.

    plan: the stages' work.
    idle_since: when the coordinator had nothing left to do but this step and its drafts, if known (the scheduler).
    launched_at: when it was launched (the loop).
    is_sent: whether it has left the first stage (`Pipeline`).
    figures: the first stage's, kept here while the step is on its way (`Pipeline`).
    """

    plan: StepPlan
    idle_since: float | None = None
    launched_at: float | None = None
    is_sent: bool = False
    figures: StageFigures | None = None

    def is_stuck(self, limit: float, answered_at: float, now: float) -> bool:
        """Return whether this step, the oldest, has taken longer than ``limit`` seconds (``core.liveness``).
        ``answered_at``: when the last result came."""
        return self.launched_at is not None and now - max(self.launched_at, answered_at) > limit

    def figures_of(self, others: Seq[StageFigures]) -> tuple[StageFigures, ...]:
        """Return the figures of all stages, given those that came with the result. If the sender has no stage itself,
        the first stage's times are shifted to its clock: its frame was received at the launch."""
        if self.figures is not None:
            return (self.figures, *others)
        if self.launched_at is None:
            return tuple(others)
        first, late = others[0], others[0].received - self.launched_at
        times = {name: getattr(first, name) - late for name in ("started", "ended", "received", "sent")}
        return (replace(first, **times), *others[1:])


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
