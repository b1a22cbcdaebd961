"""What is not true of a step that a stage can carry out. Peers are not trusted: each error ends the session."""

import mlx.core as mx

from splitinfer.core.plan import StepPlan
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
    rows, wanted = _num_rows(hidden), plan.num_tokens * rows_each
    if rows != wanted:
        raise ProtocolError(f"step {plan.step} has {rows} hidden states for stage {stage}, which takes {wanted}")
    known = range(num_ids if num_ids is not None else 2**31)
    unknown = next((t for part in plan.slices for t in (*part.token_ids, *part.scored) if t not in known), None)
    if unknown is not None:
        raise ProtocolError(f"step {plan.step} has token id {unknown}, and the model has {len(known):,}")


def _num_rows(hidden: mx.array | ReceivedRows | None) -> int:
    if hidden is None:
        return 0
    return hidden.num_rows if isinstance(hidden, ReceivedRows) else hidden.shape[0]


def check_step(step: Step, frame: Frame, longest: int) -> None:
    """Compare a message with its payload, and its positions with the ``longest`` sequence that there is room for.

    Raises:
        ProtocolError: they cannot be right.
    """
    if (step.tensor is not None) != bool(frame.parts):
        raise ProtocolError(f"step {step.plan.step} came with {len(frame.parts)} payloads")
    if step.tensor is not None and len(step.tensor.shape) != 2:
        raise ProtocolError(f"step {step.plan.step} came with hidden states of shape {step.tensor.shape}")
    if any(part.end > longest for part in step.plan.slices):
        raise ProtocolError(f"step {step.plan.step} goes beyond the {longest:,} tokens that the stage has room for")
