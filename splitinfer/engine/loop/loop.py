"""The coordinator's loop: receive, draft, plan, launch, take. It reacts to events and waits for nothing else.

    receive     read calls of other threads (submissions, aborts) and results of steps
    draft       have the drafter make the drafts that the scheduler proposes
    plan        ask the scheduler for the next step, if a stage can take one
    launch      give the step to the pipeline, which sends it when this machine's device is done
    take        read the tokens of a result, and give them to their readers

Between two draft tokens the loop looks for results, because a result may reject the drafts. Several plans in flight
keep every stage busy. If the device computes while Python continues, the next step is launched before this one is done.
"""

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from splitinfer.core.absence import Rest
from splitinfer.core.grammar import TokenRules
from splitinfer.core.liveness import limit_of
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.device.steps import StepFailed
from splitinfer.engine.drafts.drafters import FLOAT32, Drafter
from splitinfer.engine.figures.figures import Figures
from splitinfer.engine.fleet.fleet import LinkEvent
from splitinfer.engine.fleet.pipeline import LocalResult, Pipeline, StageEvent
from splitinfer.engine.housekeeping import Housekeeping
from splitinfer.engine.loop.drafting import Drafting
from splitinfer.engine.loop.open_requests import OpenRequests
from splitinfer.engine.loop.shared import InForce, Shared
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.errors import SplitinferError

log = logging.getLogger(__name__)

Call = Callable[["Loop"], object]
"""A call of another thread, which the loop makes between two steps."""

_WATCH_EVERY = 1.0  # seconds between looks at a step that does not come back


def _nothing(_loop: "Loop") -> None:
    """Do nothing: an event after which the loop plans again."""


class Stop(Exception):
    """The loop was asked to end."""


def stop(_loop: "Loop") -> None:
    """End the loop, when it makes this call."""
    raise Stop


@dataclass(frozen=True, slots=True)
class WantedCut:
    """A requested cut. ``paused`` gets the seconds during which nothing was computed."""

    rest: Rest
    paused: Future[float]


class Loop:
    """Runs the steps that ``scheduler`` plans for open requests in an open pipeline, all on the engine's thread."""

    def __init__(
        self,
        shared: Shared,
        pipeline: Pipeline,
        figures: Figures,
        housekeeping: Housekeeping[StageEvent | Call],
        drafter: Drafter | None,
        scheduler: Scheduler,
    ) -> None:
        self._shared, self._inbox, self._pipeline, self._figures = shared, shared.inbox, pipeline, figures
        self._housekeeping, self._masks = housekeeping, ThreadPoolExecutor(1, "masks")
        self._drafting = None if drafter is None else Drafting(drafter)
        self.requests = OpenRequests(shared, figures, self._drafting)
        self.wanted: deque[WantedCut] = deque()
        """Requested cuts that are not loaded yet."""
        self._busy: str | None = None  # the worker that was silent at the last look
        self._answered_at = float("-inf")  # when the last result came
        self._tuned: dict[str, Callable[[Scheduler], None]] = {}  # the changes by ``tune`` since the start
        self.use(scheduler)

    def use(self, scheduler: Scheduler) -> None:
        """Use a scheduler of the pipeline's present stages from now on, with all changes of ``tune`` applied."""
        for change in self._tuned.values():
            change(scheduler)
        self.scheduler, self._shared.in_force = scheduler, InForce(scheduler, self._pipeline.layout)
        if self._drafting is not None:
            self._drafting.use_device(self._pipeline.device)

    def tune(self, what: str, change: Callable[[Scheduler], None]) -> None:
        """Change the scheduler in force and each one that replaces it. A change replaces the earlier one with the same
        ``what``."""
        self._tuned[what] = change
        change(self.scheduler)

    # -- a turn ------------------------------------------------------------------------------

    def turn(self) -> None:
        """Launch one step, or wait for an event if there is none to launch.

        Raises:
            Stop: another thread asked the loop to end.
            WorkerLost, DeviceFailed: a stage is lost.
            SplitinferError: the pipeline has failed.
        """
        try:
            plan = self._plan()
        finally:
            self.requests.tell()  # only now: readers that wake would take the interpreter's lock from the planning
        if plan is not None:
            self._launch(plan)
            self.scheduler.learn()  # while the device computes
        # Behind the launch, so that the device does not wait for it.
        self._housekeeping.watch_machine(is_needed=bool(self.requests))
        # This turn may have handled an event that asks for another cut.
        if plan is None and not self.wanted and not (self._drafting is not None and self.scheduler.proposals()):
            self._idle()

    def _plan(self) -> StepPlan | None:
        """Handle the events that have arrived, and return the next step, if there is one to launch."""
        self._receive()
        self.requests.expire()
        self.requests.end_unable()
        if self._drafting is not None:
            self.requests.tell()  # drafts take a while
            self._drafting.make(self.scheduler, self._receive_and_tell)
        return self.scheduler.schedule(time.monotonic())

    def _launch(self, plan: StepPlan) -> None:
        """Give the latest planned step to the pipeline, and note when that was."""
        step, at = self.scheduler.in_flight[-1], time.monotonic()
        self._pipeline.launch(step, self._begin_masks(plan))
        step.launched_at = at

    def _begin_masks(self, plan: StepPlan) -> "Future[RawMasks] | None":
        """Start computing the masks of a plan, on a thread of its own. Return None if no row has rules.

        Masks need only the step's own tokens, so they are computed during the first stage; llguidance releases the GIL.
        A mask is sent uncompressed: 19 KB for 152,000 tokens, 0.15 ms of a gigabit link. Packing the difference to the
        nearest earlier mask took 0.07 to 0.16 ms on both processors.
        """
        wanted = list[tuple[int, TokenRules, list[int], int]]()
        for part in plan.slices:
            seq = self.scheduler.running.get(part.seq_id)
            if seq is not None and seq.rules is not None and part.num_logits:
                answer = [*seq.answer, *seq.drafts.ahead][: part.end - seq.num_prompt_tokens]
                wanted.append((seq.seq_id, seq.rules, answer, len(answer) + 1 - part.num_logits))
        return self._masks.submit(_computed, wanted) if wanted else None

    def settle(self) -> None:
        """Wait for the results of all steps in flight, and launch none. Raises as ``turn``."""
        while self.scheduler.in_flight:
            self._use_idle_time()
            self._handle(self._next_event())
            self.requests.tell()
        self._pipeline.steps.drain()  # all results are here, but blocks of KV may not be on disk yet

    # -- events ------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle all events that have arrived, without waiting."""
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait())

    def _receive_and_tell(self) -> None:
        self._receive()
        self.requests.tell()

    def _handle(self, event: StageEvent | Call) -> None:
        """Handle one event."""
        if isinstance(event, LinkEvent | LocalResult):
            if (result := self._pipeline.receive(event, self.scheduler.oldest)) is not None:
                self._take_result(result, event.at)
        elif isinstance(event, StepFailed):
            event.raise_if_due()
        else:
            event(self)

    def _take_result(self, result: StepResult, heard: float) -> None:
        """Take the result of the oldest step."""
        step, now = self.scheduler.oldest, time.monotonic()
        events = self.scheduler.update(result, heard)
        assert step is not None, "the scheduler took the result of a step"
        self._answered_at = now
        self._figures.returned(step, result, events, heard, now)
        self.requests.take(events, now)
        drafts = self.scheduler.speculation
        if self.scheduler.config.drafts_at_end and drafts.counts.next_to_none_right():
            log.warning(
                "%d of the first %d drafts were right: the drafter may belong to another model, or half precision may "
                "be too coarse for it (draft: NAME%s computes it in float32); drafts are made where they pay",
                drafts.counts.accepted_at[0],
                drafts.counts.tried_at[0],
                FLOAT32,
            )

    def hear(self, seconds: float = 0.0) -> None:
        """Make the calls of other threads for some seconds, while a stage is lost or loads, and end requests that timed
        out. Messages of links belong to the time before and are ignored.

        Raises:
            Stop: another thread asked the loop to end.
        """
        give_up = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._inbox.get(timeout=max(0.0, give_up - time.monotonic()))
                if not isinstance(event, StageEvent):
                    event(self)
        self.requests.expire()

    # -- while nothing can be planned ----------------------------------------------------------

    def _idle(self) -> None:
        """Do work that later steps need, then wait for an event."""
        has_read, drafting = False, self._drafting
        if drafting is not None and self._inbox.empty() and self._pipeline.steps.is_empty:
            has_read = drafting.read_ahead(self.scheduler)
        self._use_idle_time()
        if not has_read:
            self._handle(self._next_event())

    def _use_idle_time(self) -> None:
        """Build graphs of likely steps and count the steps that are done, until an event arrives."""
        self._housekeeping.build_ahead(self._pipeline.local)
        if self._inbox.empty():
            self._figures.count()

    def _next_event(self) -> StageEvent | Call:
        """Wait for the next event.

        Raises:
            SplitinferError: no event arrived, and the oldest step is overdue.
        """
        while True:
            deadline = self.scheduler.deadlines.next  # a request ends then
            within = _WATCH_EVERY if deadline is None else min(_WATCH_EVERY, max(0.0, deadline - time.monotonic()))
            event = self._housekeeping.next_event(within)
            if event is not None:
                return event
            if self.requests.expire():
                return _nothing
            self._housekeeping.watch_machine(is_needed=bool(self.requests))
            self._watch_workers()
            oldest = self.scheduler.oldest
            if oldest is not None:
                limit = limit_of(self.scheduler.predicted(oldest.plan))
                if oldest.is_stuck(limit, self._answered_at, time.monotonic()):
                    raise self._stuck(oldest, limit)
            elif self.scheduler.prefix_cache.files.ask():
                return _nothing  # the next turn plans a step that asks the stages

    def _watch_workers(self) -> None:
        """Log, once for each silence, that a worker is silent while its machine answers."""
        busy = self._pipeline.busy_name
        if busy is not None and busy != self._busy:
            log.warning("%s does not answer; its machine does", busy)
        self._busy = busy

    def _stuck(self, oldest: StepInFlight, limit: float) -> SplitinferError:
        """Return the error for a step that has taken longer than ``limit`` seconds."""
        if not oldest.is_sent:  # this machine's device hangs, and nothing in this process can make it continue
            return SplitinferError(
                f"the device of stage {self._pipeline.layout.stages[0].name} has made no progress for "
                f"{limit:.0f} s; start the coordinator again"
            )
        return self._pipeline.stuck_worker(limit)

    # -- endings -----------------------------------------------------------------------------

    def draft_again(self) -> None:
        """Forget all KV of the drafter: it was lost when this machine's device failed."""
        if self._drafting is not None:
            for seq_id in self.requests:
                self._drafting.forget(seq_id)

    def empty(self, seconds: float) -> None:
        """Abort all requests, then run until nothing is left to do or ``seconds`` are over. That saves the KV of the
        last answers."""
        give_up = time.monotonic() + seconds
        self.requests.abort_all()
        while not self.scheduler.is_idle and time.monotonic() < give_up:
            if (plan := self._plan()) is not None:
                self._launch(plan)
            elif not self.scheduler.is_idle:  # ``_plan`` may have handled the last event
                self._handle(self._next_event())
        if self.scheduler.is_idle:
            self._pipeline.steps.drain()  # the results are here, but blocks of KV may not be on disk yet

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masks.shutdown()


def _computed(wanted: "list[tuple[int, TokenRules, list[int], int]]") -> RawMasks:
    """Return the masks by (sequence, row). ``wanted``, for each slice: its sequence, the rules, the answer's tokens up
    to the slice's end, and how many of these tokens are before its first row."""
    return {
        (seq_id, row): mask
        for seq_id, rules, answer, first in wanted
        for row, mask in enumerate(rules.masks(answer, first))
        if mask is not None
    }
