"""What is not true of a step that a stage can carry out. Peers are not trusted: each error ends the session."""

from collections.abc import Sequence

import mlx.core as mx

from splitinfer.core.plan import StepPlan
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.errors import ProtocolError
from splitinfer.models.hidden_states import ReceivedRows
from splitinfer.wire.messages import Step
from transports import Frame


def check_plan(
    plan: StepPlan, hidden: mx.array | ReceivedRows | None, stage: int, num_ids: int | None, *, rows_each: int
) -> None:
    """Compare a plan with the rows that came for it, of which the stage takes so many for each token, and its tokens
    with the model's ``num_ids``.

    Raises:
        ProtocolError: the stage cannot carry it out.
    """
    rows, wanted = 0 if hidden is None else hidden.shape[0], plan.num_tokens * rows_each
    if rows != wanted:
        raise ProtocolError(f"step {plan.step} has {rows} hidden states for stage {stage}, which takes {wanted}")
    known = range(num_ids if num_ids is not None else 2**31)
    unknown = next((t for part in plan.slices for t in (*part.token_ids, *part.scored) if t not in known), None)
    if unknown is not None:
        raise ProtocolError(f"step {plan.step} has token id {unknown}, and the model has {len(known):,}")


def payload_of(step: Step, frame: Frame, longest: int) -> tuple[ReceivedRows | None, RawMasks]:
    """The hidden states and masks that came with a step. Its positions are compared with the ``longest`` sequence that
    there is room for.

    Raises:
        ProtocolError: they cannot be right.
    """
    parts = tuple(memoryview(part) for part in frame.parts)
    masks, parts = (parts[-1:], parts[:-1]) if step.masked else ((), parts)
    if (step.tensor is not None) != bool(parts) or len(masks) != bool(step.masked):
        raise ProtocolError(f"step {step.plan.step} came with {len(frame.parts)} payloads")
    if step.tensor is not None and len(step.tensor.shape) != 2:
        raise ProtocolError(f"step {step.plan.step} came with hidden states of shape {step.tensor.shape}")
    if any(part.end > longest for part in step.plan.slices):
        raise ProtocolError(f"step {step.plan.step} goes beyond the {longest:,} tokens that the stage has room for")
    hidden = None if step.tensor is None else ReceivedRows(step.tensor, step.packing, parts)
    return hidden, _cut(masks[0].cast("B"), step.masked) if masks else {}


def _cut(masks: memoryview, rows: Sequence[tuple[int, int]]) -> RawMasks:
    """The masks of these rows, which follow each other."""
    size, rest = divmod(masks.nbytes, len(rows))
    if rest:
        raise ProtocolError(f"{masks.nbytes:,} bytes came as {len(rows)} masks of one size")
    return {place: masks[at * size : (at + 1) * size] for at, place in enumerate(rows)}
