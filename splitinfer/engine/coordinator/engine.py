"""The coordinator's loop: receive, draft, plan, launch, learn. It reacts to events, and waits for nothing else.

    receive     submissions, aborts, results of steps
    draft       if the scheduler wishes for drafts, the drafter makes them
    plan        the scheduler writes the next step, if a stage can take it
    launch      hand the step to this machine's device
    learn       a result brings tokens; tokens go to their readers

One thread decides and launches. A step is sent to the next stage when the device is done with it
(``engine.coordinator.own_steps``). A step's length follows from nothing but the device.

When a worker is lost, the loop opens the pipeline again as soon as it can, and has the stages compute what they held
from the tokens, which are all here: readers see a pause. Every request ends, with one sentence, only when the worker
does not come back in time or the same loss is repeated.

Between two draft tokens the loop looks for results: one may have made them void. What is void of a step that has not
been sent yet is left out.

``max_in_flight`` plans keep every stage busy, and where the device computes while Python goes on, the next of them is
launched behind the one under way.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.liveness import StallDetector
from splitinfer.core.metrics.recent import RecentSteps
from splitinfer.core.metrics.requests import RequestFigures, RequestMeters
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.scheduler.room import seconds_until_room
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.coordinator.drafting import Drafting
from splitinfer.engine.coordinator.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.coordinator.later import Later
from splitinfer.engine.coordinator.metrics import PipelineMetrics, StageTotals, Totals
from splitinfer.engine.coordinator.own_steps import OwnResult, OwnSteps
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.coordinator.reopening import Parts, Reopening
from splitinfer.engine.coordinator.request_table import RequestTable
from splitinfer.engine.coordinator.requests import RequestState
from splitinfer.engine.coordinator.stats import stats_of
from splitinfer.engine.coordinator.trace import Trace
from splitinfer.engine.coordinator.worker_group import Event
from splitinfer.engine.device.late_steps import LATE_STEPS
from splitinfer.engine.device.steps import StepFailed
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.threads import join
from splitinfer.errors import DeviceFailed, PeerError, QueueFull, RequestError, SplitinferError, WorkerLost
from splitinfer.models.memory import HeldReport, size
from splitinfer.system import qos
from splitinfer.system.keep_awake import KeepAwake

log = logging.getLogger(__name__)

T = TypeVar("T")

Call = Callable[[], None]
_Event = Event | OwnResult | StepFailed | Call

_WATCH_EVERY = 1.0  # seconds between looks at a step that does not come back
_RETRY_EVERY = 0.25  # seconds between attempts
_SAVE = 5.0  # seconds for the KV of the last answers to be saved, at the end; a machine that is idle takes a moment
_ABORT = 0.5  # seconds for aborts to be carried out, between two steps


class _Stop(Exception):
    """The loop was asked to end."""


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
        self._inbox: Mailbox[_Event] = Mailbox()
        self._requests = RequestTable()
        self._aborted: set[int] = set()  # requests of which the loop has not heard yet that they are
        self._later = Later()
        self._watch, self._rejoin_timeout = StallDetector(), rejoin_timeout
        self._started = threading.Event()
        self._is_closing = False
        self._awake, self._held = KeepAwake("splitinfer computes answers"), HeldReport()
        self.totals, self._meters = Totals([]), RequestMeters()
        self.pipeline = build(self._inbox.put)
        self._own_steps = OwnSteps(self.pipeline, self._inbox.put, self._inbox.put)
        names = [spec.name for spec in self.pipeline.layout.stages]
        if trace is not None:
            trace.begin(names)
        self.metrics = PipelineMetrics(names, time.monotonic(), trace)
        self._in_force: tuple[Scheduler, Layout] | None = None  # both at once: other threads read them
        self.drafter: Drafter | None = None
        self._drafting: Drafting | None = None
        self._configure = configure
        parts = Parts(
            self.pipeline, self._own_steps, self._requests, self.metrics, self.totals, self._later, self._watch
        )
        self._reopening = Reopening(parts, self, configure, rejoin_timeout)
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
        self._requests.arrive(
            state,
            lambda arriving: self._check_room(state, arriving),
            lambda: self._inbox.put(lambda: self._add(state, submitted)),
        )

    def _check_room(self, state: RequestState, num_arriving: int) -> None:
        """Refuse here, in the caller's thread, what the scheduler would refuse."""
        scheduler, layout = self._both_in_force
        config, num_waiting = scheduler.config, len(scheduler.waiting) + num_arriving
        if num_waiting >= config.max_waiting:
            raise QueueFull(f"{num_waiting:,} requests wait already, and no more may; try again later")
        try:
            config.check_fits(state.sequence)
        except NeverFits as error:
            name = layout.stages[error.stage].name
            raise RequestError(
                f"a prompt and answer of {error.num_tokens:,} tokens can never fit: they need {size(error.needed)} "
                f"of KV on stage {name}, which has {size(error.there)} for it; shorten them, or give it fewer layers"
            ) from error

    def abort(self, seq_id: int) -> None:
        """End a request where it is; nothing happens if it has ended."""
        self._aborted.add(seq_id)
        self._inbox.put(lambda: self._abort(seq_id))

    def drop_session(self, session: str) -> None:
        """Free what a session keeps."""
        self._inbox.put(lambda: self.scheduler.drop(session))

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
        while not wait([result], timeout=_WATCH_EVERY).done:
            if self._requests.failure is not None:
                raise self._requests.failure
        return result.result()

    def drain(self, seconds: float) -> None:
        """Take no new request from now on; those under way have ``seconds`` to end, then they are aborted.
        Returns when none is left, or a moment later than that."""
        drained = self._requests.begin_draining()
        self._inbox.put(self._requests.check_drained)
        if not drained.wait(seconds):
            self._inbox.put(self._abort_all)
            drained.wait(_ABORT)

    def close(self, timeout: float) -> None:
        """End the loop, then the pipeline; requests under way end as aborted. ``timeout``: seconds for the loop to end,
        beside those for KV to be saved on disk."""
        self._is_closing = True
        self._inbox.put(self._raise_stop)
        if not join(self._thread, timeout + (_SAVE if self._keeps_on_disk else 0.0)):
            # The loop is inside a long step; the links can be ended from here.
            self.pipeline.close("the coordinator was stopped")

    @property
    def _keeps_on_disk(self) -> bool:
        return self._in_force is not None and self._in_force[0].config.blocks.on_disk

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Counters and per-stage figures, as plain numbers; ``reset`` begins another window."""
        self._later.run()
        scheduler, layout = self._in_force or (None, self.pipeline.layout)
        return stats_of(
            self.pipeline, layout, scheduler, self.drafter, self.totals, self.metrics, time.monotonic(), reset=reset
        )

    def request_figures(self) -> RequestFigures:
        """Distributions of requests' times and sizes, since the start."""
        return self._later.then(self._meters.read)

    def watch_steps(self, recent: RecentSteps | None) -> None:
        """Put every step that is launched from now on into ``recent``; ``None``: nobody looks any more."""
        self.metrics.watch(recent)

    def seconds_until_room(self, nth: int) -> float:
        """Seconds until ``nth`` requests more could be queued, if the queue is full."""
        scheduler = self.scheduler
        running = list(scheduler.running.values())  # at once, as the engine's thread changes it
        return seconds_until_room(running, scheduler.config, scheduler.costs, self.totals.usual_request, nth)

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
        return self._both_in_force[0]

    @property
    def _both_in_force(self) -> tuple[Scheduler, Layout]:
        assert self._in_force is not None
        return self._in_force

    @property
    def _layout(self) -> Layout:
        """The cut in force; while another is being tried, the one before."""
        return self.pipeline.layout if self._in_force is None else self._in_force[1]

    # -- the loop ----------------------------------------------------------------------------

    def _run(self, draft: Callable[[], Drafter | None]) -> None:
        reason = FinishReason.ERROR
        qos.serve_requests()
        self._awake.update(True, time.monotonic())  # loading takes minutes
        try:
            self.drafter = draft()  # before the stages say what memory is free
            self.pipeline.open()
            self.metrics.opened(self.pipeline.clocks, time.monotonic())
            self.use(Scheduler(self._configure(self.pipeline)))
            self.totals.stages = [StageTotals() for _ in range(self.pipeline.num_stages)]
            self._started.set()
            while True:
                try:
                    if self._reopening.is_asked and not self._is_waiting:
                        self._reopening.change()
                    else:
                        self._turn()
                except (WorkerLost, DeviceFailed) as loss:
                    self._reopening.rejoin(loss)
        except _Stop:
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
            self._later.run()
            self._started.set()
            self.pipeline.close(
                "the coordinator is done" if reason is FinishReason.ABORT else str(self._requests.failure)
            )
            self._own_steps.close()
            self._awake.close()

    def _turn(self) -> None:
        """One turn of the loop; at most one step is launched, and none if another cut was asked for: results of those
        under way are waited for."""
        self._receive()
        if self._reopening.is_asked:
            return
        self._watch_machine()
        self._expire()
        self._end_unable()
        if self._drafting is not None:
            self._drafting.make()
        plan = self.scheduler.schedule(time.monotonic())
        if plan is None:
            self._later.put(self.metrics.blocked)
        else:
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        """Hand a step to this machine's device. It is sent when the device is done with it."""
        self._later.put(self.metrics.launched, plan)
        self._later.put(self._meters.planned, plan.num_tokens)
        self.totals.computed_tokens += plan.num_tokens
        at = time.monotonic()
        self._own_steps.launch(plan, self._receive_without_waiting)
        self._watch.sent(at, self.scheduler.predicted(plan))

    def _receive_without_waiting(self) -> None:
        """Handle all events that have arrived."""
        while (event := self._next_event(for_ever=False)) is not None:
            self._handle(event)

    def _reads_ahead(self) -> bool:
        """Have the drafter read ahead while the device has nothing else to do. Returns whether it did."""
        if self._drafting is None or not self._inbox.is_empty or not self._own_steps.are_none:
            return False
        return self._drafting.prepare()

    def _use_idle_time(self) -> None:
        """Build graphs of steps that are likely to come; count and learn from those that have been; until an event
        comes."""
        while self._inbox.is_empty and self.pipeline.own.prepare_next():
            pass
        if self._inbox.is_empty:
            self._later.run()
        if self._inbox.is_empty:
            self.scheduler.learn()

    def _receive(self) -> None:
        """Handle all events that have arrived; wait for the first only if there is nothing else to do."""
        nothing_to_do = self._reopening.is_asked or not self._can_schedule
        if nothing_to_do:
            self._later.put(self.metrics.blocked)
            nothing_to_do = not self._reads_ahead()
            self._use_idle_time()
        while (event := self._next_event(for_ever=nothing_to_do)) is not None:
            self._handle(event)
            nothing_to_do = False

    @property
    def _can_schedule(self) -> bool:
        return self.scheduler.can_schedule or (self._drafting is not None and self._drafting.is_wished_for)

    def _handle(self, event: _Event) -> None:
        if isinstance(event, OwnResult):
            self._learn(None if self._own_steps.is_late(event) else event.result, event.at)
        elif isinstance(event, Event):
            self._learn(self.pipeline.receive(event), event.at)
        elif isinstance(event, StepFailed):
            if not event.is_late():
                raise event.error
        else:
            self._later.put(self.metrics.heard, time.monotonic())
            event()

    def _next_event(self, *, for_ever: bool) -> _Event | None:
        while True:
            try:
                return self._inbox.get(self._until_next_look() if for_ever else 0.0, expecting=self._is_waiting)
            except queue.Empty:
                if not for_ever:
                    return None
                self._expire()
                self._tick()
                if self._watch.is_stuck(time.monotonic()):
                    raise self._stuck() from None

    @property
    def _is_waiting(self) -> bool:
        return self._in_force is not None and self.scheduler.num_in_flight > 0

    def _until_next_look(self) -> float:
        """Seconds until a step may be stuck, a request's deadline, or the device's next tick."""
        if self._in_force is None:
            return _WATCH_EVERY
        now, deadline = time.monotonic(), self.scheduler.next_deadline
        tick = self.pipeline.own.until_tick(now)
        return min(
            _WATCH_EVERY,
            _WATCH_EVERY if deadline is None else max(0.0, deadline - now),
            _WATCH_EVERY if tick is None else tick,
        )

    def _tick(self) -> None:
        """Keep the device awake while requests are open."""
        self._watch_machine()
        if self._in_force is not None:
            self.pipeline.own.tick(time.monotonic())

    def _watch_machine(self) -> None:
        """Keep the machine awake while requests are open, and let its other processes know what this one holds."""
        now = time.monotonic()
        self._awake.update(bool(self._requests), now)
        self._held.update(now)

    def _stuck(self) -> SplitinferError:
        """The error for a step that does not come back."""
        oldest = self.scheduler.oldest_step
        if oldest is not None and oldest in self._own_steps:  # nothing in this process can make the device go on
            return SplitinferError(
                f"the device of stage {self._own_name} has made no progress for {self._watch.limit:.0f} s; "
                "start the coordinator again"
            )
        return self.pipeline.stuck_worker(self._watch.limit)

    @property
    def _own_name(self) -> str:
        return self.pipeline.layout.stages[0].name

    def _learn(self, result: StepResult | None, heard: float) -> None:
        if result is None:
            return
        now = time.monotonic()
        self._later.put(self.metrics.returned, result, heard)
        events = self.scheduler.update(result, heard, learn=False)
        self._own_steps.reduce(self.scheduler.still_wanted)
        if self.pipeline.num_stages > 2 and (void := self.scheduler.void_slices()):
            self.pipeline.send_void(void)
        self._watch.answered(now)
        self._later.put(self.totals.step, result, heard)
        self._later.put(LATE_STEPS.count, result)
        self._later.put(self._meters.came, [event.seq_id for event in events], now)
        for event in events:
            state = self._requests.get(event.seq_id)
            if state is None:
                continue  # a stop string ended it with an earlier token of this step
            self.totals.generated_tokens += 1
            self._later.put(self.metrics.token, event.seq_id, now)
            reason = state.take(event.token, event.finish_reason)
            if reason is not None:
                self.scheduler.finish(event.seq_id, reason)
                self._forget(event.seq_id, reason)

    # -- what opening the pipeline again needs -------------------------------------------------

    def use(self, scheduler: Scheduler) -> None:
        """Go by a scheduler of the pipeline's present stages from now on. On the loop's thread."""
        self._in_force = scheduler, self.pipeline.layout
        if self.drafter is not None:
            self.drafter.use_device(self.pipeline.own.device)
            self._drafting = Drafting(self.drafter, scheduler, self._receive_without_waiting)

    def hear(self) -> None:
        """Handle submissions and aborts for a moment, and end the requests whose time is over. On the loop's
        thread."""
        self._handle_calls()
        self._expire()

    def end_unwanted(self) -> None:
        """End the requests that were aborted, and those whose time is over, and handle nothing else. A request that is
        still in the inbox is aborted there. On the loop's thread."""
        for seq_id in list(self._aborted):
            self._abort(seq_id)
        self._expire()

    def stop_if_closing(self) -> None:
        """End the loop if the pipeline was closed from another thread. On the loop's thread."""
        if self._is_closing:
            raise _Stop

    def draft_again(self) -> None:
        """What the drafter has computed is lost with this machine's device. On the loop's thread."""
        if self._drafting is not None:
            self._drafting.begin_again(self._requests)

    def _handle_calls(self) -> None:
        """Handle submissions and aborts while a stage is away; messages of its links are ignored."""
        give_up = time.monotonic() + _RETRY_EVERY
        while (left := give_up - time.monotonic()) > 0:
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            if not isinstance(event, Event | OwnResult | StepFailed):
                event()

    # -- the end -----------------------------------------------------------------------------

    def _save_last_kv(self) -> None:
        """Save the KV of the last answers, where KV is kept on disk, within what a person would wait."""
        if not (self._keeps_on_disk and self.pipeline.is_loaded):
            return
        give_up = time.monotonic() + _SAVE
        try:
            self._abort_all()
            while not self.scheduler.is_idle and time.monotonic() < give_up:
                self._turn()
            if self.scheduler.is_idle:
                self._own_steps.drain()  # the results are here, but blocks may still be on their way to the disk
        except (SplitinferError, _Stop) as error:
            log.info("the last KV could not be saved: %s", error)

    # -- requests ----------------------------------------------------------------------------

    def _raise_stop(self) -> None:
        raise _Stop

    def _add(self, state: RequestState, submitted: float) -> None:
        try:
            self.scheduler.add(state.sequence)
        except ValueError as error:  # sequences that gave up their KV have filled the queue since it was let in
            state.end(FinishReason.ERROR, str(error))
            return
        finally:
            self._requests.arrived(state)
        self._requests.add(state)
        now = time.monotonic()
        self.totals.is_active(True, now)
        self._later.put(self._meters.submitted, state.sequence, submitted)
        self._later.put(self.metrics.submitted, state.seq_id, state.sequence.num_prompt_tokens, submitted, now)

    def _abort(self, seq_id: int) -> None:
        self._aborted.discard(seq_id)
        if self.scheduler.finish(seq_id, FinishReason.ABORT):
            self._requests[seq_id].end(FinishReason.ABORT)
            self._forget(seq_id, FinishReason.ABORT)

    def _forget(self, seq_id: int, reason: FinishReason) -> None:
        sequence = self._requests.remove(seq_id).sequence
        self.totals.prompt_tokens += sequence.num_prompt_tokens
        self.totals.cached_tokens += sequence.num_cached or 0
        self.totals.finished[reason.value] = self.totals.finished.get(reason.value, 0) + 1
        now = time.monotonic()
        if self._drafting is not None:
            self._drafting.forget(seq_id)
        self.totals.is_active(bool(self._requests), now)
        self._later.put(self.metrics.ended, seq_id, now)
        self._later.put(self._meters.ended, seq_id, now)
        self._requests.check_drained()

    def _expire(self) -> None:
        """End the requests whose time is over."""
        for seq_id in self.scheduler.expire(time.monotonic()):
            self._requests[seq_id].end(FinishReason.ABORT, "its time was over")
            self._forget(seq_id, FinishReason.ABORT)

    def _end_unable(self) -> None:
        """End the requests whose KV does not fit any more, since a stage's device had no memory left."""
        for seq, error in self.scheduler.unable():
            name = self.pipeline.layout.stages[error.stage].name
            reason = (
                f"{error.num_tokens:,} tokens need {size(error.needed)} of KV on stage {name}, whose device ran out of "
                f"memory and has {size(error.there)} for it; shorten the request, or give the stage fewer layers"
            )
            self.scheduler.finish(seq.seq_id, FinishReason.ERROR)
            self._requests[seq.seq_id].end(FinishReason.ERROR, reason)
            self._forget(seq.seq_id, FinishReason.ERROR)

    def _abort_all(self) -> None:
        for seq_id in self._requests:
            self._abort(seq_id)
