"""The coordinator's loop: receive, draft, plan, launch, learn. It reacts to events, and waits for nothing else.

    receive     submissions, aborts, results of steps
    draft       if the scheduler proposes drafts, the drafter makes them
    plan        the scheduler writes the next step, if a stage can take it
    launch      hand the step to this machine's device
    learn       a result brings tokens; tokens go to their readers

One thread decides and launches. A step is sent to the next stage when the device is done with it
(``engine.coordinator.own_steps``). A step's length follows from nothing but the device.

Between two draft tokens the loop looks for results: one may have made them void. What is void of a step that has not
been sent yet is left out.

Several plans under way keep every stage busy, and where the device computes while Python goes on, the next of them is
launched behind the one under way.
"""

import queue
import time
from collections.abc import Callable

from splitinfer.core.liveness import StallDetector, limit_of
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.coordinator.drafting import Drafting
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.masking import Masking
from splitinfer.engine.coordinator.open_requests import InForce, OpenRequests
from splitinfer.engine.coordinator.own_steps import OwnResult, OwnSteps
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.coordinator.worker_handle import Event
from splitinfer.engine.device.steps import StepFailed
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.upkeep import Upkeep
from splitinfer.errors import SplitinferError

Call = Callable[[], None]
LoopEvent = Event | OwnResult | StepFailed | Call

WATCH_EVERY = 1.0  # seconds between looks at a step that does not come back
_RETRY_EVERY = 0.25  # seconds between attempts to reach a stage that is away


def _nothing() -> None:
    """An event after which there is something to plan."""


class Stop(Exception):
    """The loop was asked to end."""


class Loop:
    """Runs steps for the open requests. Everything here is on the engine's thread.

    ``use`` it with a scheduler before the first turn. ``is_closing``: whether the pipeline was closed from another
    thread; ``is_asked``: whether another cut is to be loaded, before which no turn may wait.
    """

    def __init__(
        self,
        inbox: Mailbox[LoopEvent],
        pipeline: Pipeline,
        requests: OpenRequests,
        figures: Figures,
        is_closing: Callable[[], bool],
        is_asked: Callable[[], bool],
    ) -> None:
        self._inbox, self._pipeline, self._requests, self._figures = inbox, pipeline, requests, figures
        self._is_closing, self._is_asked = is_closing, is_asked
        self.own_steps = OwnSteps(pipeline, inbox.put, inbox.put)
        self.masking = Masking()
        self.watch = StallDetector()
        self.upkeep = Upkeep(inbox)
        self.drafter: Drafter | None = None
        self._drafting: Drafting | None = None
        self._is_emptying = False

    def use(self, scheduler: Scheduler) -> None:
        """Go by a scheduler of the pipeline's present stages from now on."""
        self._requests.in_force = InForce(scheduler, self._pipeline.layout)
        if self.drafter is not None:
            self.drafter.use_device(self._pipeline.own.device)
            self._drafting = Drafting(self.drafter, scheduler, self._receive_and_tell)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in force."""
        return self._requests.now_in_force.scheduler

    @property
    def is_waiting(self) -> bool:
        """Whether steps are under way."""
        return self._requests.in_force is not None and self.scheduler.num_in_flight > 0

    # -- a turn ------------------------------------------------------------------------------

    def turn(self) -> None:
        """Launch one step, or wait for an event if there is none to launch.

        Raises:
            Stop: the loop is asked to end.
            WorkerLost, DeviceFailed: a stage is lost.
            SplitinferError: the pipeline has failed.
        """
        try:
            plan = self._plan()
        finally:
            self._requests.tell()  # not before: readers would take the interpreter's lock from the plan
        if plan is not None:
            self._launch(plan)
            self.scheduler.learn()  # while the device computes
        self._watch_machine()  # after the launch: the device need not wait for it
        has_proposals = self._drafting is not None and self._drafting.has_proposals
        # What wakes the loop for another cut, or ends what is to be emptied, may have been taken in by this turn.
        is_done = self._is_asked() or (self._is_emptying and self.scheduler.is_idle)
        if plan is None and not is_done and not has_proposals:
            self._idle()

    def _plan(self) -> StepPlan | None:
        """Take in what has come, and decide on the next step."""
        while not self._inbox.is_empty:
            self._handle(self._inbox.get(0.0))
        self._requests.expire()
        self._requests.end_unable()
        if self._drafting is not None:
            self._requests.tell()  # drafts take a while
            self._drafting.make()
        return self.scheduler.schedule(time.monotonic())

    def _receive_and_tell(self) -> None:
        self._receive()
        self._requests.tell()

    def settle(self) -> None:
        """Take in one event, and launch nothing: steps under way are to come back.

        Raises:
            as ``turn``.
        """
        self._use_idle_time()
        self._handle(self._next_event())
        self._requests.tell()

    def _launch(self, plan: StepPlan) -> None:
        """Hand a step to this machine's device. It is sent when the device is done with it."""
        step, at = self.scheduler.newest, time.monotonic()
        self._figures.launched(step)
        self.own_steps.launch(step, self._receive_and_tell, self.masking.begin(plan, self.scheduler.running))
        step.launched_at, step.limit = at, limit_of(self.scheduler.predicted(plan))

    # -- receive -----------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle all events that have arrived; wait for none."""
        while not self._inbox.is_empty:
            self._handle(self._inbox.get(0.0))

    def _idle(self) -> None:
        """Nothing can be planned: do what is of use later, then wait for an event."""
        self._figures.blocked()
        has_read = self._reads_ahead()
        self._use_idle_time()
        if not has_read:
            self._handle(self._next_event())

    def _reads_ahead(self) -> bool:
        """Have the drafter read ahead while the device has nothing else to do. Returns whether it did."""
        if self._drafting is None or not self._inbox.is_empty or not self.own_steps.are_none:
            return False
        return self._drafting.prepare()

    def _use_idle_time(self) -> None:
        """Build graphs of steps that are likely to come, and count those that have been, until an event comes."""
        self.upkeep.build_ahead(self._pipeline.own)
        if self._inbox.is_empty:
            self._figures.count()

    def _next_event(self) -> LoopEvent:
        """Wait for the next event.

        Raises:
            SplitinferError: none came, and a step does not come back.
        """
        while True:
            event = self.upkeep.next_event(self._pipeline.own, self._until_next_look(), expecting=self.is_waiting)
            if event is not None:
                return event
            if self._requests.expire():
                return _nothing
            self._watch_machine()
            if self.watch.is_stuck(self.scheduler.oldest, time.monotonic()):
                raise self._stuck()
            if not self.is_waiting and self.scheduler.prefix_cache.files.ask():
                return _nothing  # the next turn plans a step for it

    def _until_next_look(self) -> float:
        """Seconds until a step may be stuck, or a request's deadline."""
        deadline = self.scheduler.next_deadline
        return WATCH_EVERY if deadline is None else min(WATCH_EVERY, max(0.0, deadline - time.monotonic()))

    def _watch_machine(self) -> None:
        """Keep the machine awake while requests are open, and let its other processes know what this one holds."""
        self.upkeep.watch_machine(is_needed=bool(self._requests))

    def _stuck(self) -> SplitinferError:
        """The error for a step that does not come back."""
        oldest = self.scheduler.oldest
        assert oldest is not None
        if not oldest.is_sent:  # nothing in this process can make the device go on
            return SplitinferError(
                f"the device of stage {self._pipeline.layout.stages[0].name} has made no progress for "
                f"{oldest.limit:.0f} s; start the coordinator again"
            )
        return self._pipeline.stuck_worker(oldest.limit)

    def _handle(self, event: LoopEvent) -> None:
        """Act on an event."""
        if isinstance(event, OwnResult):
            self._learn(None if self.own_steps.is_late(event) else event.result, event.at)
        elif isinstance(event, Event):
            self._learn(self._pipeline.receive(event), event.at)
        elif isinstance(event, StepFailed):
            if not event.is_late():
                raise event.error
        else:
            self._figures.heard(time.monotonic())
            event()

    # -- learn -------------------------------------------------------------------------------

    def _learn(self, result: StepResult | None, heard: float) -> None:
        if result is None:
            return
        step, now = self.scheduler.oldest, time.monotonic()
        if step is not None and step.figures is not None:
            result = result.after(step.figures)
        events = self.scheduler.update(result, heard, learn=False)
        assert step is not None, "the scheduler took the result of a step"
        self.own_steps.reduce(self.scheduler.leave_out_rejected)
        if self._pipeline.num_stages > 2 and (void := self.scheduler.rejected_slices()):
            self._pipeline.send_void(void)
        self.watch.answered_at = now
        self._figures.returned(step, result, heard)
        self._requests.take(events, now)

    # -- while the pipeline is opened again ----------------------------------------------------

    def hear(self) -> None:
        """Handle submissions and aborts for a moment, while a stage is away; messages of its links are ignored. End
        the requests whose time is over."""
        give_up = time.monotonic() + _RETRY_EVERY
        while (left := give_up - time.monotonic()) > 0:
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if not isinstance(event, Event | OwnResult | StepFailed):
                event()
        self._requests.expire()

    def stop_if_closing(self) -> None:
        """End the loop if the pipeline was closed from another thread.

        Raises:
            Stop: it was.
        """
        if self._is_closing():
            raise Stop

    def forget_drafts(self, seq_id: int) -> None:
        """A sequence has ended: the drafter needs it no more."""
        if self._drafting is not None:
            self._drafting.forget(seq_id)

    def draft_again(self) -> None:
        """What the drafter has computed is lost with this machine's device."""
        if self._drafting is not None:
            self._drafting.begin_again(self._requests)

    def empty(self, seconds: float) -> None:
        """Abort all requests and run until nothing is left to do, for some seconds at most: the KV of the last answers
        is saved that way."""
        give_up, self._is_emptying = time.monotonic() + seconds, True
        self._requests.abort_all()
        while not self.scheduler.is_idle and time.monotonic() < give_up:
            self.turn()
        if self.scheduler.is_idle:
            self.own_steps.drain()  # the results are here, but blocks may still be on their way to the disk
