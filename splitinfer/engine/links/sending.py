"""A finished step on its way to the next stage."""

import time
from dataclasses import replace

from splitinfer.core.plan import StageFigures
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.models.hidden_states import to_parts
from splitinfer.wire.messages import Step


def outgoing(
    done: Finished, masks: RawMasks, before: tuple[StageFigures, ...] | None = None, received: float = 0.0
) -> tuple[Step, tuple[memoryview, ...], StageFigures]:
    """What is sent of a step, its payload, and what the step cost here. ``masks``: for the last stage. ``before``: the
    figures of earlier stages, which are sent with these; without them this is the first stage, which keeps its own.
    ``received``: when its frame had arrived, in seconds."""
    sent, now = to_parts(done.hidden, done.packed), time.monotonic()
    num_bytes = sum(part.nbytes for part in sent.parts)
    here = replace(done.figures, received=received, bytes_sent=num_bytes, sent=now, unfit=sent.num_unfit)
    step = Step(done.plan, sent.spec, () if before is None else (*before, here), sent.packing, tuple(masks))
    return step, (*sent.parts, memoryview(b"".join(masks.values()))) if masks else sent.parts, here
