"""Checks that a stage can carry out a step. Peers are not trusted: each error ends the session."""

from collections.abc import Sequence

import mlx.core as mx

from splitinfer.core.plan import StepPlan
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.errors import ProtocolError
from splitinfer.models.border.hidden_states import ReceivedRows
from splitinfer.wire.messages import Rows
from transports import Frame


def check_rows(plan: StepPlan, hidden: mx.array | ReceivedRows | None, stage: int, *, rows_each: int) -> None:
    """Compare a plan with the rows that arrived for it. The stage takes ``rows_each`` rows for each token.

    Raises:
        ProtocolError: the number of rows is wrong.
    """
    rows, wanted = 0 if hidden is None else hidden.shape[0], plan.num_tokens * rows_each
    if rows != wanted:
        raise ProtocolError(f"step {plan.step} has {rows} hidden states for stage {stage}, which takes {wanted}")


def check_plan(plan: StepPlan, num_ids: int | None, longest: int) -> None:
    """Compare a plan's token ids with the model's ``num_ids``, and its positions with the ``longest`` sequence that has
    room.

    Raises:
        ProtocolError: the stage cannot carry out the plan.
    """
    if any(part.end > longest for part in plan.slices):
        raise ProtocolError(f"step {plan.step} goes beyond the {longest:,} tokens that the stage has room for")
    known = range(num_ids if num_ids is not None else 2**31)
    unknown = next((t for part in plan.slices for t in (*part.token_ids, *part.scored) if t not in known), None)
    if unknown is not None:
        raise ProtocolError(f"step {plan.step} has token id {unknown}, and the model has {len(known):,}")


def payload_of(rows: Rows, frame: Frame) -> tuple[ReceivedRows | None, RawMasks]:
    """Return the hidden states and masks that arrived with a step.

    Raises:
        ProtocolError: the payload does not match the message.
    """
    parts = tuple(memoryview(part) for part in frame.parts)
    masks, parts = (parts[-1:], parts[:-1]) if rows.masked else ((), parts)
    if (rows.tensor is not None) != bool(parts) or len(masks) != bool(rows.masked):
        raise ProtocolError(f"step {rows.step} came with {len(frame.parts)} payloads")
    if rows.tensor is not None and len(rows.tensor.shape) != 2:
        raise ProtocolError(f"step {rows.step} came with hidden states of shape {rows.tensor.shape}")
    hidden = None if rows.tensor is None else ReceivedRows(rows.tensor, rows.packing, parts)
    return hidden, _cut(masks[0].cast("B"), rows.masked) if masks else {}


def _cut(masks: memoryview, rows: Sequence[tuple[int, int]]) -> RawMasks:
    """Split the bytes of all masks, and return the mask of each row."""
    size, rest = divmod(masks.nbytes, len(rows))
    if rest:
        raise ProtocolError(f"{masks.nbytes:,} bytes came as {len(rows)} masks of one size")
    return {place: masks[at * size : (at + 1) * size] for at, place in enumerate(rows)}
