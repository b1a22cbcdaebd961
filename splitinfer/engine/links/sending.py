"""A finished step on its way to the next stage."""

import time
from dataclasses import replace
from typing import NamedTuple

from splitinfer.core.plan import RowMask, StageFigures, StepPlan
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.step_graph import StepGraph
from splitinfer.models.hidden_states import Sent, to_parts
from splitinfer.models.tensors import spec_of
from splitinfer.wire import codec
from splitinfer.wire.messages import Step
from splitinfer.wire.session import Session
from transports import Frame, Link


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


class Encoded(NamedTuple):
    """A message and its header."""

    message: Step
    header: bytes

    @classmethod
    def of(cls, message: Step) -> "Encoded":
        """A message, encoded."""
        return cls(message, codec.encode(message))

    @classmethod
    def ahead(cls, plan: StepPlan, graph: StepGraph) -> "Encoded | None":
        """What the first stage sends of a step that is under way, if nothing changes meanwhile; ``None`` if it cannot
        be told yet, because not all packed rows may fit."""
        if graph.packed is not None:
            return None
        return cls.of(Step(plan, None if graph.hidden is None else spec_of(graph.hidden)))

    def is_of(self, out: Outgoing) -> bool:
        """Whether it is a finished step's, without figures."""
        return self.message.plan is out.plan and self.message.tensor == out.sent.spec and out.sent.packing is None


def send_step(
    link: Link,
    session: Session,
    out: Outgoing,
    figures: tuple[StageFigures, ...],
    masks: tuple[RowMask, ...] = (),
    ahead: Encoded | None = None,
) -> None:
    """Send a completed step to the next stage. ``figures``: of stages so far; the first keeps its own. ``masks``: for
    the last one. ``ahead``: the message without figures and masks, encoded while the step was computed.

    Raises:
        LinkClosed, TransportError: it cannot be sent.
    """
    if ahead is None or masks or not ahead.is_of(out):
        ahead = Encoded.of(Step(out.plan, out.sent.spec, figures, out.sent.packing, masks))
    session.sending(ahead.message)
    link.send(Frame(ahead.header, out.sent.parts))
