"""The interface of a device. A step's result leaves when the device is done with it, and nothing guesses when that is.

    launching thread    build the graph ── launch ─▶ ticket ── build the next ...
    device                                   └─ started ........ ended
    waiting thread                                 wait(ticket) ─────┴─▶ span: the step's figures, then its result

A device that ``computes_at_launch`` needs no waiting thread: the step is done when ``launch`` returns, or soon after.
Any other may hold the launching thread for most of a step, so whatever needs a step's end waits on another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from splitinfer.core.scheduler.cost_model import Shape


@dataclass(frozen=True, slots=True)
class Work:
    """What is launched, for devices whose times follow from that: a step of this shape, or one draft."""

    shape: Shape
    is_draft: bool = False


DRAFT = Work(Shape(1), is_draft=True)


def round_of(sequences: int) -> Work:
    """The work of a round of drafts: one for each of some sequences."""
    return Work(Shape(sequences), is_draft=True)


@dataclass(frozen=True, slots=True)
class Span:
    """When the device computed, in seconds on the monotonic clock of this process.

    ``notes``: what the device says besides, for the figures.
    """

    started: float
    ended: float
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Ticket:
    """A launch. ``outputs``: the arrays that are evaluated when it is done. ``span`` is set by ``Device.wait``."""

    outputs: Sequence[mx.array]
    launched: float
    span: Span | None = field(default=None)


class Device(Protocol):
    """Computes launches in their order. One thread launches; any thread may wait."""

    @property
    def computes_at_launch(self) -> bool:
        """Whether a launch takes as long as computing it, so that launching ahead would only delay results."""
        ...

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """Have the device compute arrays.

        Args:
            outputs: what is read when the ticket is done.
            pending: what has to be computed too, and is read by later launches only.
            work: what it is.
            began: when the host began to prepare it, in seconds on the monotonic clock.

        Raises:
            DeviceFailed: the device did.
        """
        ...

    def wait(self, ticket: Ticket) -> Span:
        """Wait until a launch is done.

        Raises:
            DeviceFailed: the device did.
        """
        ...

    def stay_awake(self) -> None:
        """Give the device next to nothing to compute, so that it does not lower its clock. Call on the launching
        thread."""
        ...
