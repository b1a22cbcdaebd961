"""Opens the pipeline again while requests are under way, by one road for two reasons.

    a stage is lost   the steps under way are forgotten
    another cut       the steps under way come back first (``Loop.settle``)

Then, until it works: if another cut was asked for, open that; a scheduler of its stages takes all sequences over. Else,
or if that cannot be done, open the cut in force; its own scheduler goes on. Either way the stages compute again what
they held, from the tokens, which are all here, or read it from disk; readers see a pause. So a cut that was asked for
can do without a lost stage. Meanwhile calls of other threads are carried out (``Loop.hear``).
"""

import logging
import time
from collections.abc import Callable

from splitinfer.common.plain_text import size
from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.liveness import LossCounter, RejoinDeadline
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.engine.figures.figures import Figures
from splitinfer.engine.fleet.pipeline import Pipeline
from splitinfer.engine.loop.loop import Loop, Stop, WantedCut
from splitinfer.engine.loop.shared import Shared
from splitinfer.errors import CannotFit, DeviceFailed, PeerError, RequestError, SplitinferError, WorkerLost

log = logging.getLogger(__name__)

_RECONNECT = 1.0  # seconds for one attempt to reach a worker, so that calls are carried out in between
_RETRY_EVERY = 0.25  # seconds between attempts


class Reopening:
    """Opens a loop's pipeline again.

    ``configure`` makes the bounds of a scheduler, given the open pipeline. ``timeout``: seconds that requests wait for
    a lost stage; 0 ends them at once.
    """

    def __init__(
        self,
        loop: Loop,
        shared: Shared,
        pipeline: Pipeline,
        figures: Figures,
        configure: Callable[[Pipeline], SchedulerConfig],
        timeout: float,
    ) -> None:
        self._loop, self._shared, self._pipeline, self._figures = loop, shared, pipeline, figures
        self._configure, self._timeout = configure, timeout
        self._losses = LossCounter()

    def turn(self) -> None:
        """Have the loop turn; if that loses a stage, or another cut is wanted, open the pipeline again.

        Raises:
            WorkerLost, DeviceFailed: that took too long, or the same loss was repeated without a token in between.
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
        """Wait until all stages are back, then have them compute what they held."""
        pipeline, is_local = self._pipeline, isinstance(loss, DeviceFailed)
        name = pipeline.layout.stages[0].name if is_local else pipeline.lost_name
        if isinstance(loss, DeviceFailed):
            loss = DeviceFailed(f"stage {name} cannot go on: {loss}", loss.no_memory)
        self._shared.lost_stage = name or "of a worker"
        self._figures.lost(name, time.monotonic())
        log.warning("%s; %s", loss, self._remedy(loss))
        # At once, so that no worker computes for nobody; each attempt renews them again.
        pipeline.renew_links(str(loss))
        if is_local:
            self._loop.draft_again()
        self._open(loss, self._next_wanted())
        log.warning("all stages are back; continuing where it stopped")

    def _remedy(self, loss: WorkerLost | DeviceFailed) -> str:
        """Return what is done about a loss, as part of a sentence.

        Raises:
            WorkerLost, DeviceFailed: nothing; the loss is repeated, or is not to be waited for.
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
        """Return the cut that was asked for first; none is loaded while the coordinator ends."""
        while self._loop.wanted:
            wanted = self._loop.wanted.popleft()
            if not self._shared.is_draining:
                return wanted
            wanted.paused.set_exception(PeerError("the coordinator is shutting down and loads no other cut"))
        return None

    def _open(self, loss: SplitinferError, wanted: WantedCut | None) -> None:
        """Open the pipeline with a cut that is wanted, or as it is, until that works; ``loss``: said if it does not."""
        cut, began = self._pipeline.layout, time.monotonic()
        patience = RejoinDeadline(self._timeout, began)
        while True:
            refusal = None if wanted is None else self._change_to(wanted.layout)
            if wanted is not None and refusal is None:
                wanted.paused.set_result(time.monotonic() - began)
                return
            why_not = self._open_again(cut, patience)
            if wanted is not None:
                wanted.paused.set_exception(refusal)
            if why_not is None:
                return
            self._shared.lost_stage = self._shared.lost_stage or self._pipeline.lost_name or "of a worker"
            self._loop.hear(_RETRY_EVERY)
            if patience.is_over(time.monotonic(), anybody_waits=bool(self._loop.requests)):
                raise WorkerLost(f"{loss}; it was not back after {self._timeout:.0f} s: {why_not}")
            wanted = self._next_wanted()

    def _change_to(self, layout: Layout) -> SplitinferError | None:
        """Open the pipeline with another cut; why that cannot be done, if so."""
        self._shared.is_changing = True
        try:
            self._load(layout)
        except Stop:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the cut in force works
            refusal = _refusal(error, layout)
            log.warning("cut %s cannot be used: %s", layout.cut, refusal)
            return refusal
        finally:
            self._shared.is_changing = False
        return None

    def _load(self, layout: Layout) -> None:
        loop, pipeline = self._loop, self._pipeline
        loop.hear()  # so that nothing is opened once the loop is asked to end
        pipeline.use_layout(layout)
        pipeline.open(meanwhile=loop.hear)
        loop.scheduler.requeue_all()
        loop.use(loop.scheduler.moved_to(self._configure(pipeline)))
        self._figures.opened(layout, time.monotonic())
        self._shared.lost_stage = None

    def _open_again(self, layout: Layout, patience: RejoinDeadline) -> str | None:
        """Open the pipeline with the cut in force; the reason if that cannot be done yet."""
        loop, pipeline = self._loop, self._pipeline
        loop.hear()
        pipeline.use_layout(layout)
        try:
            pipeline.open(_RECONNECT, patience.left(time.monotonic()), loop.hear)
        except (PeerError, CannotFit) as error:  # memory that another process has taken may be free again
            return str(error)
        loop.scheduler.requeue_all(pipeline.kept())
        loop.use(loop.scheduler)
        self._figures.opened(layout, time.monotonic())
        self._shared.lost_stage = None
        return None


def _refusal(error: Exception, layout: Layout) -> SplitinferError:
    """Return why a cut cannot be used."""
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
