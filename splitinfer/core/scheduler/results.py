"""Checks that a step's result answers its plan. The pipeline keeps order, so only a broken peer sends another."""

from collections.abc import Mapping

from splitinfer.core.plan import SampledToken, Slice, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.sequence import Sequence


def check_result(result: StepResult, oldest: StepInFlight | None, running: Mapping[int, Sequence]) -> StepInFlight:
    """Return the step that ``result`` answers, which must be the ``oldest`` in flight.

    Raises:
        ValueError: it is another step's result, or has tokens that the plan's slices did not ask for.
    """
    if oldest is None or result.step != oldest.plan.step:
        expected = None if oldest is None else oldest.plan.step
        raise ValueError(f"the result of step {result.step} came where that of step {expected} was due")
    rows = {part.seq_id: part.num_logits for part in oldest.plan.slices if part.num_logits}
    got = {sampled.seq_id: sampled.tokens for sampled in result.sampled}
    left_out = rows.keys() - got.keys()  # by a stage in the middle, because they are void
    if got.keys() - rows.keys() or not all(
        _may_lack(part, running) for part in oldest.plan.slices if part.seq_id in left_out
    ):
        raise _wrong(result, rows)
    asked = {part.seq_id: part.num_next for part in oldest.plan.slices}
    if any(len(one.drafts) > asked[one.seq_id] for one in result.sampled):
        raise ValueError(f"step {result.step} has more drafts than it asked for")
    if not all(_answers(part, got, running) for part in oldest.plan.slices):
        raise _wrong(result, rows)
    return oldest


def _wrong(result: StepResult, rows: Mapping[int, int]) -> ValueError:
    counts = {one.seq_id: len(one.tokens) for one in result.sampled}
    return ValueError(f"step {result.step} asked for {rows} tokens by sequence and got {counts}")


def _may_lack(part: Slice, running: Mapping[int, Sequence]) -> bool:
    """Whether a slice may have been left out: it is void, or was when its sequence ended."""
    seq = running.get(part.seq_id)
    if not part.begins_with_draft:
        return False
    return seq is None or part.is_void(len(seq.tokens) - 1, seq.tokens[-1])


def _answers(part: Slice, got: Mapping[int, tuple[SampledToken, ...]], running: Mapping[int, Sequence]) -> bool:
    """Whether the tokens received for a slice are possible for its rows and drafts."""
    tokens, seq = got.get(part.seq_id, ()), running.get(part.seq_id)
    if not part.num_drafts:
        return len(tokens) == part.num_logits
    if seq is None and part.begins_with_draft:
        return True  # the sequence has ended: whether this slice was void is no longer known
    if seq is not None and part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
        return not tokens
    return part.is_verdict([token.token_id for token in tokens])
