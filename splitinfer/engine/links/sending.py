"""A finished step on its way to the next stage."""

import time
from dataclasses import replace
from typing import NamedTuple

from splitinfer.core.plan import StageFigures, StepPlan
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.models.hidden_states import Sent, to_parts
from splitinfer.wire.messages import Step


class Outgoing(NamedTuple):
    """A finished step's rows, and what it cost."""

    plan: StepPlan
    sent: Sent
    figures: StageFigures

    @classmethod
    def of(cls, done: Finished, received: float = 0.0) -> "Outgoing":
        """A finished step's. ``received``: when its frame had arrived, in seconds."""
        sent = to_parts(done.hidden, done.packed)
        num_bytes = sum(part.nbytes for part in sent.parts)
        now = time.monotonic()
        figures = replace(done.figures, received=received, bytes_sent=num_bytes, sent=now, unfit=sent.num_unfit)
        return cls(done.plan, sent, figures)

    def message(self, figures: tuple[StageFigures, ...], masks: RawMasks) -> tuple[Step, tuple[memoryview, ...]]:
        """What is sent to the next stage, and the payload. ``figures``: of stages so far; the first keeps its own.
        ``masks``: for the last one."""
        step = Step(self.plan, self.sent.spec, figures, self.sent.packing, tuple(masks))
        parts = self.sent.parts
        return step, (*parts, memoryview(b"".join(masks.values()))) if masks else parts
