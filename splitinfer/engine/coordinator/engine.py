"""What other threads use of a pipeline that runs, and its thread: open, turn for turn, end.

The thread opens the pipeline, then lets the loop (``engine.coordinator.loop``) turn. When a worker is lost, or another
cut was asked for, it opens the pipeline again (``engine.coordinator.reopening``) and has the stages compute what they
held from the tokens, which are all here: readers see a pause. Every request ends, with one sentence, only when the
worker does not come back in time or the same loss is repeated.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from splitinfer.core.layout import Layout
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.scheduler.room import seconds_until_room
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.coordinator.figures import Figures, Watch
from splitinfer.engine.coordinator.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.coordinator.loop import WATCH_EVERY, Loop, LoopEvent, Stop
from splitinfer.engine.coordinator.open_requests import OpenRequests
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.coordinator.reopening import Reopening
from splitinfer.engine.coordinator.requests import RequestState
from splitinfer.engine.coordinator.stats import stats_of
from splitinfer.engine.coordinator.trace import Trace
from splitinfer.engine.coordinator.worker_handle import Event
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.threads import clears_streams
from splitinfer.errors import DeviceFailed, PeerError, SplitinferError, WorkerLost
from splitinfer.system import qos

log = logging.getLogger(__name__)

T = TypeVar("T")

_SAVE = 5.0  # seconds for the KV of the last answers to be saved, at the end; a machine that is idle takes a moment
_ABORT = 0.5  # seconds for aborts to be carried out, between two steps


class Engine:
    """Runs a pipeline for many requests.

    ``build`` makes the pipeline, given where to put its events; ``configure`` makes the scheduler's
    bounds once the stages are known. Both run on the engine's thread. ``rejoin_timeout``: seconds that
    requests wait for a lost worker to come back; 0 ends them at once. ``trace``: where every step is drawn.
    ``draft``: makes the drafter, if there is one, on the engine's thread.
    """

    def __init__(
        self,
        build: Callable[[Callable[[Event], None]], Pipeline],
        configure: Callable[[Pipeline], SchedulerConfig],
        rejoin_timeout: float,
        trace: Trace | None = None,
        draft: Callable[[], Drafter | None] = lambda: None,
    ) -> None:
        self._inbox: Mailbox[LoopEvent] = Mailbox()
        self._configure, self._rejoin_timeout = configure, rejoin_timeout
        self._started = threading.Event()
        self._is_closing = False
        self.pipeline = build(self._inbox.put)
        self.figures = Figures(self.pipeline.layout, time.monotonic(), trace)
        self._requests = OpenRequests(self.figures, lambda seq_id: self._loop.forget_drafts(seq_id))
        self._loop = Loop(
            self._inbox,
            self.pipeline,
            self._requests,
            self.figures,
            is_closing=lambda: self._is_closing,
            is_asked=lambda: self._reopening.is_asked,
        )
        self._reopening = Reopening(self._loop, self.pipeline, self._requests, self.figures, configure, rejoin_timeout)
        self._thread = threading.Thread(target=self._run, args=(draft,), name="engine", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Block until all stages are loaded.

        Raises:
            SplitinferError: what kept them from it.
        """
        while not self._started.wait(timeout=0.5):
            pass
        if self._requests.failure is not None:
            raise self._requests.failure

    def submit(self, state: RequestState) -> None:
        """Submit a request; its events begin to arrive.

        Raises:
            QueueFull: too many wait already.
            RequestError: its KV can never fit.
            SplitinferError: the pipeline has failed, was closed, or is being drained.
        """
        submitted = time.monotonic()
        self._requests.submit(state, lambda: self._inbox.put(lambda: self._requests.add(state, submitted)))

    def abort(self, seq_id: int) -> None:
        """End a request where it is; nothing happens if it has ended."""
        self._requests.abort_soon(seq_id)
        self._inbox.put(lambda: self._requests.abort(seq_id))

    def drop_session(self, session: str) -> None:
        """Free what a session keeps."""
        self._inbox.put(lambda: self.scheduler.forget(session))

    def tune(self, policy_config: PolicyConfig, token_budget: Callable[[Pipeline], int], max_running: int) -> None:
        """Go by other rules from the next step on, also after another cut. ``token_budget``: what it is with the open
        stages; called on the engine's thread."""
        self._tune("rules", lambda it: it.tune(policy_config, token_budget(self.pipeline), max_running))

    def fix_groups(self, count: int | None) -> None:
        """Have requests decode in so many groups from the next step on, however fast that is, also after another cut;
        ``None``: as the layout has it, by cost. For measurements."""
        self._tune("groups", lambda it: it.fix_groups(count))

    def _tune(self, what: str, change: Callable[[Scheduler], None]) -> None:
        self._inbox.put(lambda: self._reopening.tune(what, change))

    def recut(self, layout: Layout) -> float:
        """Load another cut of the same model. Requests wait meanwhile, and go on with the same tokens: what the stages
        held is computed again from them, or read from disk where all stages have it. Returns the seconds of the pause.

        Raises:
            SplitinferError: the cut cannot be loaded, or has no room for a request under way; the one before is in
                force again. Or the pipeline has failed, was closed, or is being drained.
        """
        paused = self._reopening.ask(layout)
        if self._requests.failure is not None:
            raise self._requests.failure
        self._inbox.put(lambda: None)  # wakes the loop
        return paused.result()

    def carry_out(self, work: Callable[[], T]) -> T:
        """Have the loop's thread carry out ``work`` between two steps, and return its result. For what must not meet a
        step that is being built.

        Raises:
            SplitinferError: the pipeline has failed, or was closed.
            Exception: what ``work`` raises.
        """
        result = Future[T]()

        def act() -> None:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's
                result.set_exception(error)

        self._inbox.put(act)
        while not wait([result], timeout=WATCH_EVERY).done:
            if self._requests.failure is not None:
                raise self._requests.failure
        return result.result()

    def drain(self, seconds: float) -> None:
        """Take no new request from now on; those under way have ``seconds`` to end, then they are aborted.
        Returns when none is left, or a moment later than that."""
        drained = self._requests.begin_draining()
        self._inbox.put(self._requests.check_drained)
        if not drained.wait(seconds):
            self._inbox.put(self._requests.abort_all)
            drained.wait(_ABORT)

    def close(self, timeout: float) -> None:
        """End the loop, then the pipeline; requests under way end as aborted. ``timeout``: seconds for the loop to end,
        beside those for KV to be saved on disk."""
        self._is_closing = True
        self._inbox.put(self._raise_stop)
        self._thread.join(timeout + (_SAVE if self._keeps_on_disk else 0.0))
        if self._thread.is_alive():
            # The loop is inside a long step; the links can be ended from here.
            self.pipeline.close("the coordinator was stopped")

    @property
    def _keeps_on_disk(self) -> bool:
        in_force = self._requests.in_force
        return in_force is not None and in_force.scheduler.config.blocks.on_disk

    def stats(self) -> dict[str, Any]:
        """Counters and per-stage figures, as plain numbers."""
        scheduler, layout = self._requests.in_force or (None, self.pipeline.layout)
        drafter, now = self._loop.drafter, time.monotonic()
        return stats_of(self.pipeline, layout, scheduler, drafter, self.figures, now)

    def request_figures(self) -> dict[str, Histogram]:
        """Distributions of requests' times and sizes, since the start."""
        return self.figures.histograms()

    def watch_steps(self, watch: Watch | None) -> None:
        """Give every step that comes back from now on to ``watch``; ``None`` ends that."""
        self.figures.watch = watch

    def seconds_until_room(self, nth: int) -> float:
        """Seconds until ``nth`` requests more could be queued, if the queue is full."""
        scheduler = self.scheduler
        running = list(scheduler.running.values())  # at once, as the engine's thread changes it
        return seconds_until_room(running, scheduler.config, scheduler.costs, self.figures.usual_request, nth)

    def health(self) -> PipelineHealth:
        """How the pipeline is now."""
        failure, lost = self._requests.failure, self._reopening.lost_stage
        state = StageState.READY if failure is None else StageState.STOPPED
        stages = tuple(
            StageHealth(spec.name, spec.start, spec.end, StageState.LOST if spec.name == lost else state)
            for spec in self._layout.stages
        )
        if failure is not None:
            reason = "the pipeline has failed" if lost is None else f"stage {lost} was lost and did not come back"
            return PipelineHealth(stages, failure=reason)
        if lost is not None:
            return PipelineHealth(stages, f"stage {lost}, for up to {self._rejoin_timeout:.0f} s")
        if self._reopening.is_changing:
            return PipelineHealth(stages, "another cut of the layers", is_changing=True)
        return PipelineHealth(stages)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. It exists once the stages are loaded."""
        return self._requests.now_in_force.scheduler

    @property
    def _layout(self) -> Layout:
        """The cut in force; while another is being tried, the one before."""
        in_force = self._requests.in_force
        return self.pipeline.layout if in_force is None else in_force.layout

    # -- the thread --------------------------------------------------------------------------

    @clears_streams
    def _run(self, draft: Callable[[], Drafter | None]) -> None:
        reason, loop = FinishReason.ERROR, self._loop
        qos.serve_requests()
        loop.upkeep.watch_machine(is_needed=True)  # loading takes minutes
        try:
            loop.drafter = draft()  # before the stages say what memory is free
            self.pipeline.open()
            self.figures.opened(self.pipeline.layout, time.monotonic())
            loop.use(Scheduler(self._configure(self.pipeline)))
            self._started.set()
            while True:
                self._turn()
        except Stop:
            self._requests.failure, reason = PeerError("the pipeline was closed"), FinishReason.ABORT
            self._save_last_kv()
        except SplitinferError as error:
            self._requests.failure = error
        except Exception as error:
            if not self._is_closing:  # else the pipeline was closed under it, on purpose
                log.exception("the engine failed")
            self._requests.failure = SplitinferError(f"the coordinator failed ({type(error).__name__}: {error})")
        finally:
            self._requests.end_all(reason)
            self._reopening.refuse_all(self._requests.failure or PeerError("the pipeline was closed"))
            self.figures.count()
            self._started.set()
            self.pipeline.close(
                "the coordinator is done" if reason is FinishReason.ABORT else str(self._requests.failure)
            )
            loop.own_steps.close()
            loop.masking.close()
            loop.upkeep.close()

    def _turn(self) -> None:
        """A turn of the loop, or, where another cut was asked for, what leads to it: the steps under way come back."""
        try:
            if not self._reopening.is_asked:
                self._loop.turn()
            elif self._loop.is_waiting:
                self._loop.settle()
            else:
                self._reopening.change()
        except (WorkerLost, DeviceFailed) as loss:
            self._reopening.rejoin(loss)

    def _save_last_kv(self) -> None:
        """Save the KV of the last answers, where KV is kept on disk, within what a person would wait."""
        if not (self._keeps_on_disk and self.pipeline.is_open):
            return
        try:
            self._loop.empty(_SAVE)
        except (SplitinferError, Stop) as error:
            log.info("the last KV could not be saved: %s", error)
        except Exception:
            if self.pipeline.is_open:  # else it took too long, and ``close`` has closed the pipeline under it
                log.exception("the last KV could not be saved")

    def _raise_stop(self) -> None:
        raise Stop
