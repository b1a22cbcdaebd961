"""A finished step on its way to the next stage."""

import time
from dataclasses import replace

from splitinfer.core.plan import RowMask, StageFigures
from splitinfer.engine.stage.runner import Finished
from splitinfer.models.hidden_states import to_parts
from splitinfer.wire import codec
from splitinfer.wire.messages import Step
from splitinfer.wire.session import Session
from transports import Frame, Link


def send_step(
    link: Link,
    session: Session,
    earlier: tuple[StageFigures, ...],
    done: Finished,
    received: float = 0.0,
    masks: tuple[RowMask, ...] = (),
) -> None:
    """Send a completed step to the next stage: its plan, its hidden states, the figures of all stages so far, and the
    masks for the last one.

    Raises:
        LinkClosed, TransportError: it cannot be sent.
    """
    out = to_parts(done.hidden, done.packed)
    bytes_sent = sum(part.nbytes for part in out.parts)
    figures = replace(
        done.figures, received=received, bytes_sent=bytes_sent, sent=time.monotonic(), unfit=out.num_unfit
    )
    message = Step(done.plan, out.spec, (*earlier, figures), out.packing, masks)
    session.sending(message)
    link.send(Frame(codec.encode(message), out.parts))
