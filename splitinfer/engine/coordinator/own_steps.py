"""Steps on the coordinator's own layers: launched by the loop, and sent to the next stage when the device is done.

Where the device computes at launch, the loop sends; else the thread that waits for the device does, because launching
the next step may hold the loop for most of a step. What a result has made void in the meantime is not sent.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from typing import NamedTuple

from splitinfer.core.plan import StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.stage.launched import Launched
from splitinfer.engine.stage.masking import Masks, RawMasks, read_masks
from splitinfer.engine.stage.runner import StageRunner


class OwnResult(NamedTuple):
    """The result of a step, where the coordinator's stage is the last one, when it was there, and after how many
    losses."""

    result: StepResult
    at: float
    era: int


class OwnSteps:
    """The steps under way on the coordinator's own stage.

    ``returned`` receives the results where there is no other stage; ``failed`` what was raised while a step was waited
    for or sent. Both are called on the thread that does that.
    """

    def __init__(
        self, pipeline: Pipeline, returned: Callable[[OwnResult], None], failed: Callable[[StepFailed], None]
    ) -> None:
        self._pipeline, self._returned = pipeline, returned
        self._leaving = threading.Lock()  # no plan changes while it leaves
        self._steps = StepsUnderWay[Launched](failed)
        self._era = 0  # losses so far

    def launch(self, step: StepInFlight, receive: Callable[[], None], masks: Future[RawMasks] | None = None) -> None:
        """Hand a step to the device. It is sent when the device is done with it. ``receive``: takes in results that
        have come; called where a step with drafts is done at once, before it is sent. ``masks``: of its rows.

        Raises:
            WorkerLost, DeviceFailed, ProtocolError: it cannot be launched, or was done at once and cannot be sent.
        """
        plan, own = step.plan, self._pipeline.own
        if own.needs_verdict(plan):
            self._steps.drain()
        launched = own.launch(plan, None, self._own_masks(masks), self._steps.under_way())
        is_done = own.device.computes_at_launch
        if is_done and step.can_be_rejected:
            receive()
        for_last = masks if self._pipeline.num_stages > 1 else None
        self._steps.add(launched, own.wait, partial(self._send, own, step, for_last), is_done=is_done)

    def _own_masks(self, masks: Future[RawMasks] | None) -> Masks | None:
        """The masks that this machine itself applies: those of the last stage."""
        if masks is None or self._pipeline.num_stages > 1:
            return None
        size = self._pipeline.vocab_size
        return cache(lambda: read_masks(masks.result(), size))

    def _send(self, own: StageRunner, step: StepInFlight, masks: Future[RawMasks] | None, launched: Launched) -> None:
        """Send a step that is done. ``masks``: of its rows, for the last stage."""
        done = own.finish(launched)
        with self._leaving:
            step.is_sent, plan = True, step.plan
        result = self._pipeline.send(step, done.reduced_to(plan), {} if masks is None else masks.result())
        if result is not None:
            self._returned(OwnResult(result, time.monotonic(), self._era))
        own.store(launched)

    def reduce(self, leave_out_void: Callable[[], None]) -> None:
        """Have what is void left out of the steps that have not been sent. Call after each result."""
        with self._leaving:
            leave_out_void()

    def is_late(self, result: OwnResult) -> bool:
        """Whether a result is from before the last loss."""
        return result.era != self._era

    @property
    def are_none(self) -> bool:
        """Whether no step is under way here."""
        return self._steps.is_empty

    def drain(self) -> None:
        """Block until all have been sent."""
        self._steps.drain()

    def drop(self) -> None:
        """Forget all, because a stage was lost; what they still bring is late."""
        self._steps.drop()
        self._era += 1

    def close(self) -> None:
        """End the thread that waits, if there is one."""
        self._steps.close()
