"""The interface of a device. A step's result leaves when the device is done with it, and nothing guesses when that is.

    launching thread    build the graph ── launch ─▶ ticket ── build the next ...
    device                                   └─ started ........ ended
    waiting thread                                 wait(ticket) ─────┴─▶ span: the step's figures, then its result

A device that ``computes_at_launch`` needs no waiting thread: the step is done when ``launch`` returns, or soon after.
Any other may hold the launching thread for most of a step, so whatever needs a step's end waits on another thread.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import DeviceFailed


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
    """When the device computed, in seconds on the monotonic clock of this process."""

    started: float
    ended: float


@dataclass(slots=True)
class Ticket:
    """A launch. ``outputs``: the arrays that are evaluated when it is done. ``span`` is set by ``Device.wait``."""

    outputs: Sequence[mx.array]
    launched: float
    span: Span | None = None
    _failure: DeviceFailed | None = None
    _waiting: threading.Lock = field(default_factory=threading.Lock)

    def once(self, wait: Callable[[], Span]) -> Span:
        """The span, which ``wait`` returns. One thread waits at the device, and every other one for that thread: MLX
        gives up a launched array's event without a lock, and tells an error to one of those who wait.

        Raises:
            DeviceFailed: ``wait`` raised it, now or for another thread.
        """
        with self._waiting:
            if self._failure is not None:
                raise self._failure
            if self.span is None:
                try:
                    self.span = wait()
                except DeviceFailed as failure:
                    self._failure = failure
                    raise
            return self.span


class Device(Protocol):
    """Computes launches in their order. One thread launches; any thread may wait."""

    @property
    def computes_at_launch(self) -> bool:
        """Whether a launch takes as long as computing it, so that launching ahead would only delay results."""
        ...

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """Have the device compute arrays.

        Args:
            outputs: what the host reads when the ticket is done. No later launch may read it: on CUDA an array that the
                host reads moves to other memory.
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
