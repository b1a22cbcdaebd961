"""Opens the pipeline again while requests are open, in the same way for two reasons.

    a stage is lost   forget the steps in flight
    another cut       wait for the steps in flight first (``Loop.settle``)

Then repeat until it works: if a cut is requested, open that one, and a scheduler of its stages takes over all
sequences. Otherwise, or if that fails, open the cut in force, whose scheduler goes on. In both cases the stages compute
their KV again from the tokens, which are all here, or read it from disk, and readers see a pause. So a requested cut
may leave out a lost stage; ``Absent`` requests one when a worker stays away. Meanwhile the loop makes the calls of
other threads (``Loop.hear``).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from splitinfer.common.plain_text import size
from splitinfer.core.absence import Rest
from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.liveness import LossCounter, RejoinDeadline
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.engine.figures.figures import Figures
from splitinfer.engine.fleet.pipeline import Pipeline
from splitinfer.engine.loop.absent import Absent
from splitinfer.engine.loop.loop import Loop, Stop, WantedCut
from splitinfer.engine.loop.shared import Shared
from splitinfer.errors import CannotFit, DeviceFailed, PeerError, RequestError, SplitinferError, WorkerLost

log = logging.getLogger(__name__)

_RECONNECT = 1.0  # seconds for one attempt to reach a worker; between attempts the loop makes other threads' calls
_RETRY_EVERY = 0.25  # seconds between attempts


class Reopening:
    """Opens a loop's pipeline again.

    ``configure`` makes a scheduler's bounds for the open pipeline. ``timeout``: seconds that requests wait for a lost
    stage; 0 ends them at once. ``absent``: decides whether the others go on without it.
    """

    def __init__(
        self,
        loop: Loop,
        shared: Shared,
        pipeline: Pipeline,
        figures: Figures,
        configure: Callable[[Pipeline], SchedulerConfig],
        timeout: float,
        absent: Absent,
    ) -> None:
        self._loop, self._shared, self._pipeline, self._figures = loop, shared, pipeline, figures
        self._configure, self._timeout = configure, timeout
        self._losses, self._absent, self._in_force = LossCounter(), absent, Rest(pipeline.layout)

    def turn(self) -> None:
        """Run one turn of the loop. If that loses a stage, or another cut is requested, open the pipeline again.

        Raises:
            WorkerLost, DeviceFailed: opening took too long, or the loss was repeated without a token in between.
            Stop, SplitinferError: as ``Loop.turn``.
        """
        try:
            if not self._loop.wanted:
                self._loop.turn()
                return
            self._loop.settle()
        except (WorkerLost, DeviceFailed) as loss:
            self._recover(loss)
            return
        if (wanted := self._next_wanted()) is not None:
            self._figures.paused(time.monotonic())
            self._open(WorkerLost(f"the cut {self._pipeline.layout.cut} cannot be loaded again"), wanted)

    def _recover(self, loss: WorkerLost | DeviceFailed) -> None:
        """Wait until all stages are back, then have them compute their KV again."""
        pipeline, is_local = self._pipeline, isinstance(loss, DeviceFailed)
        name = pipeline.layout.stages[0].name if is_local else pipeline.lost_name
        if isinstance(loss, DeviceFailed):
            loss = DeviceFailed(f"stage {name} cannot go on: {loss}", loss.no_memory)
        self._shared.lost_stage = name or "of a worker"
        self._figures.lost(name, time.monotonic())
        if not is_local:
            self._absent.lost(time.monotonic())
        log.warning("%s; %s", loss, self._remedy(loss))
        # At once, so that workers stop computing lost steps; each attempt to open renews the links again.
        pipeline.renew_links(str(loss))
        if is_local:
            self._loop.draft_again()
        if self._open(loss, self._next_wanted()):
            log.warning("all stages are back; continuing where it stopped")

    def _remedy(self, loss: WorkerLost | DeviceFailed) -> str:
        """Return, as part of a sentence, how the loss is repaired.

        Raises:
            WorkerLost, DeviceFailed: the loss is repeated, or requests do not wait for a lost stage.
        """
        stage, scheduler = loss.no_memory_on if isinstance(loss, WorkerLost) else None, self._loop.scheduler
        if isinstance(loss, DeviceFailed) and loss.no_memory:
            stage = 0
        if stage is not None and scheduler.lower_budget(stage):
            kv = scheduler.kv.budget.stages[stage]
            return f"it gets at most {size(kv.budget_bytes)} of KV from now on, and fewer requests at a time"
        if self._timeout <= 0 or not self._losses.another(self._figures.generated_tokens):
            raise loss
        if isinstance(loss, DeviceFailed):
            return "it recomputes what it held"
        return f"waiting up to {self._timeout:.0f} s for it: {self._pipeline.remedy}"

    # -- both --------------------------------------------------------------------------------

    def _next_wanted(self) -> WantedCut | None:
        """Return the cut that was requested first, or None. Refuse all of them while the coordinator shuts down."""
        while self._loop.wanted:
            wanted = self._loop.wanted.popleft()
            if not self._shared.is_draining:
                return wanted
            wanted.paused.set_exception(PeerError("the coordinator is shutting down and loads no other cut"))
        return None

    def _open(self, loss: SplitinferError, wanted: WantedCut | None) -> bool:
        """Try until the pipeline is open, with the wanted cut, without workers that stay away, or with the cut in
        force. Return whether it is the one in force. ``loss``: the error after a timeout."""
        self._in_force = replace(self._in_force, layout=self._pipeline.layout)  # some may have moved
        began = time.monotonic()
        patience = RejoinDeadline(self._timeout, began)
        while True:
            refusal = None if wanted is None else self._change_to(wanted.rest)
            if wanted is not None and refusal is None:
                wanted.paused.set_result(time.monotonic() - began)
                return False
            why_not = self._open_again(patience)
            if wanted is not None:
                wanted.paused.set_exception(refusal)
            if why_not is None:
                return True
            self._shared.lost_stage = self._shared.lost_stage or self._pipeline.lost_name or "of a worker"
            rest = self._absent.rest(time.monotonic() - began, time.monotonic())
            if rest is not None and self._change_to(rest) is None:
                return False
            self._loop.hear(_RETRY_EVERY)
            if patience.is_over(time.monotonic(), anybody_waits=bool(self._loop.requests)):
                raise WorkerLost(f"{loss}; it was not back after {self._timeout:.0f} s: {why_not}")
            wanted = self._next_wanted()

    def _change_to(self, rest: Rest) -> SplitinferError | None:
        """Open the pipeline with another cut. Return None, or the error if that fails."""
        self._shared.is_changing, began = True, time.monotonic()
        try:
            self._load(rest)
        except Stop:
            raise
        except Exception as error:  # noqa: BLE001 - after any error the cut in force still works
            refusal = _refusal(error, rest.layout)
            log.warning("cut %s cannot be used: %s", rest.layout.cut, refusal)
            self._absent.failed(time.monotonic())
            return refusal
        finally:
            self._shared.is_changing = False
        self._absent.loaded(rest, time.monotonic() - began)
        return None

    def _load(self, rest: Rest) -> None:
        loop, pipeline = self._loop, self._pipeline
        loop.hear()  # raises ``Stop`` before anything is opened, if the loop must end
        pipeline.use_layout(rest)
        pipeline.open(meanwhile=loop.hear)
        loop.scheduler.requeue_all()
        loop.use(loop.scheduler.moved_to(self._configure(pipeline)))
        self._figures.opened(rest.layout, time.monotonic())
        self._shared.lost_stage, self._in_force = None, rest

    def _open_again(self, patience: RejoinDeadline) -> str | None:
        """Open the pipeline with the cut in force. Return None, or the reason if that fails for now."""
        loop, pipeline = self._loop, self._pipeline
        loop.hear()
        pipeline.use_layout(self._in_force)
        try:
            pipeline.open(_RECONNECT, patience.left(time.monotonic()), loop.hear)
        except (PeerError, CannotFit) as error:  # memory that another process holds may be free later
            return str(error)
        loop.scheduler.requeue_all(pipeline.kept())
        loop.use(loop.scheduler)
        self._figures.opened(pipeline.layout, time.monotonic())
        self._shared.lost_stage = None
        return None


def _refusal(error: Exception, layout: Layout) -> SplitinferError:
    """Return the error that says why a cut cannot be used."""
    if isinstance(error, NeverFits):
        name = layout.stages[error.stage].name
        return RequestError(
            f"a request under way has no room in the cut {layout.cut}: {error.num_tokens:,} tokens need "
            f"{size(error.needed)} of KV on stage {name}, which has {size(error.there)}; try again when it has ended"
        )
    if isinstance(error, SplitinferError):
        return error
    log.error("the cut %s cannot be loaded", layout.cut, exc_info=error)
    return SplitinferError(f"the cut {layout.cut} cannot be loaded ({type(error).__name__}: {error})")
