"""Opens the pipeline again while requests are under way: as it was, when a stage was lost, or with another cut.

    a stage is lost   open until all stages are back; they compute again what they held, from the tokens, which are here
    another cut       open the other stages; a scheduler of theirs takes all sequences over. If that cannot be done, the
                      cut before is opened again, as after a loss, and its own scheduler goes on

All of it is on the loop's thread and between two turns, never within one, so that no step is half launched and no draft
half made; before another cut is opened, the steps under way come back. Readers see a pause. While a lost stage is
waited for, a cut that was asked for is tried, too: it may do without that stage. While stages load, which may take
minutes, requests can be aborted, and nothing else is heard.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.liveness import LossCounter, RejoinDeadline
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.engine.coordinator.open_requests import OpenRequests
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.errors import CannotFit, DeviceFailed, PeerError, RequestError, SplitinferError, WorkerLost
from splitinfer.models.memory import size

log = logging.getLogger(__name__)

_RECONNECT = 1.0  # seconds for one attempt to reach a worker, so that aborts are handled in between


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A cut that was asked for. ``paused``: gets the seconds in which nothing was computed."""

    layout: Layout
    paused: Future[float]


class Reopening:
    """Opens a loop's pipeline again.

    ``configure`` makes the bounds of a scheduler, given the open pipeline. ``rejoin_timeout``: seconds that requests
    wait for a lost stage; 0 ends them at once.
    """

    def __init__(
        self,
        loop: Loop,
        pipeline: Pipeline,
        requests: OpenRequests,
        figures: Figures,
        configure: Callable[[Pipeline], SchedulerConfig],
        rejoin_timeout: float,
    ) -> None:
        self._loop, self._pipeline, self._requests, self._figures = loop, pipeline, requests, figures
        self._configure, self._timeout = configure, rejoin_timeout
        self._losses = LossCounter()
        self._wanted: deque[_Wanted] = deque()
        self.lost_stage: str | None = None
        """The stage that requests wait for, or waited for until they gave up."""
        self.is_changing = False
        """Whether another cut is being loaded."""
        self._tuned: dict[str, Callable[[Scheduler], None]] = {}  # what was tuned since the start

    def tune(self, what: str, change: Callable[[Scheduler], None]) -> None:
        """Change the scheduler in force, and each that takes its place. ``what``: an earlier change of the same is
        forgotten. On the loop's thread."""
        self._tuned[what] = change
        change(self._loop.scheduler)

    def _tune_again(self, scheduler: Scheduler) -> None:
        """Change a scheduler by all that was tuned since the start."""
        for change in self._tuned.values():
            change(scheduler)

    # -- another cut -------------------------------------------------------------------------

    def ask(self, layout: Layout) -> Future[float]:
        """Ask for another cut, from any thread; ``change`` loads it. The result is the seconds of the pause."""
        wanted = _Wanted(layout, Future())
        self._wanted.append(wanted)
        return wanted.paused

    @property
    def is_asked(self) -> bool:
        """Whether another cut was asked for, and is not loaded yet."""
        return bool(self._wanted)

    def change(self) -> None:
        """Open the pipeline with the cut that was asked for first, or again with the one in force. No step may be under
        way.

        Raises:
            WorkerLost, DeviceFailed: neither can be opened.
        """
        pipeline, began = self._pipeline, time.monotonic()
        before, wanted = pipeline.layout, self._wanted[0]
        error = self._objection()
        if error is not None:
            self._refuse(error)
            return
        self._loop.own_steps.drain()  # all results are here, but blocks of KV may be on their way to the disk
        self._figures.lost(began)
        error = self._attempt(wanted.layout)
        if error is None:
            self._wanted.popleft().paused.set_result(time.monotonic() - began)
            return
        log.warning("cut %s cannot be used: %s", wanted.layout.cut, error)
        self._loop.stop_if_closing()
        pipeline.relay(before)
        patience = RejoinDeadline(self._timeout, time.monotonic())
        reason = self._open(patience)
        self._refuse(error)
        if reason is not None:
            self.lost_stage = pipeline.lost_name or "of a worker"
            self._wait(WorkerLost(f"the cut {before.cut} cannot be loaded again"), reason, patience)
        self._resume()

    def refuse_all(self, error: SplitinferError) -> None:
        """Tell everybody who asked for another cut that the pipeline has ended."""
        while self._wanted:
            self._refuse(error)

    def _refuse(self, error: SplitinferError) -> None:
        self._wanted.popleft().paused.set_exception(error)

    def _objection(self) -> SplitinferError | None:
        """Why no other cut is to be loaded now, if so."""
        if self._requests.is_draining:
            return PeerError("the coordinator is shutting down and loads no other cut")
        return None

    def _attempt(self, layout: Layout) -> SplitinferError | None:
        """Open the pipeline with another cut; why that cannot be done, if so."""
        self.is_changing = True
        try:
            self._open_cut(layout)
        except NeverFits as error:
            return _no_room(error, layout)
        except SplitinferError as error:
            return error
        except Exception as error:  # whatever it is, the cut before it works
            log.exception("the cut %s cannot be loaded", layout.cut)
            return SplitinferError(f"the cut {layout.cut} cannot be loaded ({type(error).__name__}: {error})")
        finally:
            self.is_changing = False
        return None

    def _open_cut(self, layout: Layout) -> None:
        loop, pipeline = self._loop, self._pipeline
        pipeline.relay(layout)
        pipeline.open(meanwhile=self._requests.end_unwanted)
        loop.scheduler.replay()
        moved = loop.scheduler.moved_to(self._configure(pipeline))
        self._tune_again(moved)
        loop.use(moved)
        self._figures.relaid([spec.name for spec in layout.stages], pipeline.clocks, time.monotonic())

    # -- a stage is lost ---------------------------------------------------------------------

    def rejoin(self, loss: WorkerLost | DeviceFailed) -> None:
        """Wait until all stages are back, then have them compute what they held.

        Raises:
            WorkerLost, DeviceFailed: it took too long, or the same loss was repeated without a token in between.
        """
        pipeline, totals = self._pipeline, self._figures.totals
        own_name = pipeline.layout.stages[0].name
        if isinstance(loss, DeviceFailed):
            loss = DeviceFailed(f"stage {own_name} cannot go on: {loss}", loss.no_memory)
        lost = own_name if isinstance(loss, DeviceFailed) else pipeline.lost_name
        self.lost_stage = lost or "of a worker"
        totals.lost(lost)
        log.warning("%s; %s", loss, self._remedy(loss))
        self._figures.lost(time.monotonic())
        pipeline.regroup(str(loss))
        self._loop.own_steps.drop()
        if isinstance(loss, DeviceFailed):
            self._loop.draft_again()
        patience = RejoinDeadline(self._timeout, time.monotonic())
        reason = self._open(patience)
        if reason is not None:
            self._wait(loss, reason, patience)
        self._resume()
        totals.rejoins += 1
        log.warning("all stages are back; continuing where it stopped")

    def _remedy(self, loss: WorkerLost | DeviceFailed) -> str:
        """What is done about a loss, as part of a sentence.

        Raises:
            WorkerLost, DeviceFailed: nothing; the loss is repeated, or is not to be waited for.
        """
        stage, scheduler = _stage_without_memory(loss), self._loop.scheduler
        if stage is not None and scheduler.lower_budget(stage):
            kv = scheduler.kv.budget.stages[stage]
            return f"it gets at most {size(kv.budget_bytes)} of KV from now on, and fewer requests at a time"
        if self._timeout <= 0 or not self._losses.another(self._figures.generated_tokens):
            raise loss
        if isinstance(loss, DeviceFailed):
            return "it recomputes what it held"
        return f"waiting up to {self._timeout:.0f} s for it: {self._pipeline.remedy}"

    # -- both --------------------------------------------------------------------------------

    def _wait(self, loss: WorkerLost | DeviceFailed, reason: str | None, patience: RejoinDeadline) -> None:
        """Open the pipeline until that works. ``reason``: why it has not worked so far."""
        while reason is not None:
            self._loop.hear()
            if patience.is_over(time.monotonic(), anybody_waits=bool(self._requests)):
                raise WorkerLost(f"{loss}; it was not back after {self._timeout:.0f} s: {reason}")
            if self.is_asked and self._change_instead():
                return
            reason = self._open(patience)

    def _change_instead(self) -> bool:
        """Open the pipeline with the cut that was asked for, in place of the one that has lost a stage; whether that
        could be done."""
        wanted, before, began = self._wanted[0], self._pipeline.layout, time.monotonic()
        error = self._objection() or self._attempt(wanted.layout)
        if error is None:
            self._wanted.popleft().paused.set_result(time.monotonic() - began)
            return True
        self._loop.stop_if_closing()
        self._pipeline.relay(before)
        self._refuse(error)
        return False

    def _open(self, patience: RejoinDeadline) -> str | None:
        """Open the pipeline as it was; the reason if that cannot be done yet."""
        try:
            self._pipeline.open(_RECONNECT, patience.left(time.monotonic()), self._requests.end_unwanted)
        except (PeerError, CannotFit) as error:  # memory that another process has taken may be free again
            self._loop.stop_if_closing()
            return str(error)
        return None

    def _resume(self) -> None:
        """All stages are there, and hold nothing but what they have on disk."""
        scheduler = self._loop.scheduler
        scheduler.replay(self._pipeline.kept())
        self._tune_again(scheduler)  # what was tuned while no stage was there to go by
        self._loop.use(scheduler)
        self._figures.resumed(self._pipeline.clocks, time.monotonic())
        self.lost_stage = None


def _no_room(error: NeverFits, layout: Layout) -> RequestError:
    """Why a cut cannot be used while a request is under way."""
    name = layout.stages[error.stage].name
    return RequestError(
        f"a request under way has no room in the cut {layout.cut}: {error.num_tokens:,} tokens need "
        f"{size(error.needed)} of KV on stage {name}, which has {size(error.there)}; try again when it has ended"
    )


def _stage_without_memory(loss: WorkerLost | DeviceFailed) -> int | None:
    """The stage whose device had no memory left, if that is why."""
    if isinstance(loss, DeviceFailed):
        return 0 if loss.no_memory else None
    return loss.no_memory_on
