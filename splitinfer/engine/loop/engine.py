"""The engine: a thread that runs a pipeline, and the calls by which other threads use it.

The thread opens the pipeline, then runs turns of the loop (``engine.loop.loop``). If a worker is lost or another cut is
requested, it opens the pipeline again (``engine.loop.reopening``), and readers see a pause. All requests end with one
error only if the worker does not come back in time or the same loss is repeated.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from splitinfer.core.absence import Rest
from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason
from splitinfer.core.speculation.speculation import Speculation
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.engine.figures.figures import Figures
from splitinfer.engine.figures.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.figures.trace import Trace
from splitinfer.engine.fleet.fleet import Notice
from splitinfer.engine.fleet.pipeline import Pipeline, PipelineConfig, StageEvent
from splitinfer.engine.housekeeping import Housekeeping
from splitinfer.engine.loop.absent import Absent, Replan
from splitinfer.engine.loop.loop import Call, Loop, Stop, WantedCut, stop
from splitinfer.engine.loop.reopening import Reopening
from splitinfer.engine.loop.shared import Shared
from splitinfer.engine.threads import clears_streams
from splitinfer.errors import PeerError, SplitinferError
from splitinfer.system import qos

log = logging.getLogger(__name__)

T = TypeVar("T")

_SAVE = 5.0  # seconds to save the KV of the last answers at the end; an idle machine takes a moment
_ABORT = 0.5  # seconds to abort requests, between two steps
_LOOK_EVERY = 0.2  # seconds between checks whether the engine still runs, while a thread waits for its result


class Engine:
    """Runs a pipeline for many requests.

    ``config``: the pipeline to open. ``notice``: called with the stages' progress, from several threads. ``configure``:
    makes the scheduler's bounds once the stages are loaded, and ``draft`` makes the drafter or returns None, both on
    the engine's thread. ``rejoin_timeout``: seconds that requests wait for a lost worker. ``trace``: gets every step.
    ``replan``: makes a layout without workers that are away for ``leave_after`` seconds; None: requests only wait.
    """

    def __init__(
        self,
        config: PipelineConfig,
        notice: Notice,
        configure: Callable[[Pipeline], SchedulerConfig],
        rejoin_timeout: float,
        trace: Trace | None = None,
        draft: Callable[[], Drafter | None] = lambda: None,
        replan: Replan | None = None,
        leave_after: float = math.inf,
    ) -> None:
        self._shared = Shared(queue.SimpleQueue())
        self.submit = self._shared.submit
        self._configure, self._rejoin_timeout, self._draft = configure, rejoin_timeout, draft
        self._replan, self._leave_after = replan, leave_after
        self._started = threading.Event()
        self.pipeline = Pipeline(config, self._shared.inbox.put, notice)
        self.figures = Figures(self.pipeline.layout, time.monotonic(), trace)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Block until all stages are loaded.

        Raises:
            SplitinferError: they could not be loaded.
        """
        while not self._started.wait(timeout=0.5):
            pass
        if self._shared.failure is not None:
            raise self._shared.failure

    def abort(self, seq_id: int) -> None:
        """End a request early. Do nothing if it has ended."""
        self.call(lambda loop: loop.requests.abort(seq_id))

    def call(self, act: Call) -> None:
        """Have the engine's thread call ``act`` with its loop, between two steps."""
        self._shared.inbox.put(act)

    def recut(self, layout: Layout, by_key: frozenset[str] = frozenset()) -> float:
        """Load another cut of the same model, and return the seconds of the pause. Requests go on with the same tokens:
        the stages compute their KV again from them, or read it from disk if all stages have it. ``by_key``: the stages
        whose addresses were found by their keys.

        Raises:
            SplitinferError: the cut cannot be loaded, or has no room for an open request, and the previous cut is in
                force again; or the pipeline has failed, was closed, or is draining.
        """
        paused = Future[float]()

        def want(loop: Loop) -> None:
            if by_key:
                self.pipeline.follow(by_key)
            loop.wanted.append(WantedCut(Rest(layout), paused))

        self.call(want)
        return self._result(paused)

    def carry_out(self, work: Callable[[], T]) -> T:
        """Have the loop's thread call ``work`` between two steps, and return its result. For work that must not run
        while a step is built.

        Raises:
            SplitinferError: the pipeline has failed or was closed.
            Exception: as ``work``.
        """
        result = Future[T]()

        def act(_loop: Loop) -> None:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's
                result.set_exception(error)

        self.call(act)
        return self._result(result)

    def _result(self, future: Future[T]) -> T:
        """Wait for the engine's thread to complete ``future``, and return its result. Raises the future's exception, or
        the engine's failure if the engine ends first."""
        while self._shared.failure is None and not wait([future], timeout=_LOOK_EVERY).done:
            pass
        if not future.done() and self._shared.failure is not None:
            raise self._shared.failure
        return future.result()

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and abort the open ones after ``seconds``. Return when no request is left, or a moment
        after the abort."""
        drained = self._shared.begin_draining()
        self.call(lambda loop: loop.requests.note_empty())
        if not drained.wait(seconds):
            self.call(lambda loop: loop.requests.abort_all())
            drained.wait(_ABORT)

    def close(self, timeout: float) -> None:
        """End the loop, then the pipeline; open requests end as aborted. ``timeout``: seconds for the loop to end, not
        counting the time to save KV on disk."""
        self._shared.is_closing = True
        self.call(stop)
        self._thread.join(timeout + (_SAVE if self._keeps_on_disk else 0.0))
        if self._thread.is_alive():
            # The loop is inside a long step; this thread can close the links.
            self.pipeline.close("the coordinator was stopped")

    @property
    def _keeps_on_disk(self) -> bool:
        in_force = self._shared.in_force
        return in_force is not None and in_force.scheduler.config.blocks.on_disk

    def stats(self) -> dict[str, Any]:
        """Return counters and per-stage figures, as plain numbers."""
        scheduler, layout = self._shared.in_force or (None, self.pipeline.layout)
        stats, drafter = self.figures.as_dict(time.monotonic()), self._shared.drafter
        if scheduler is not None:
            stats |= _queue_stats(scheduler)
            stats["costs"] = scheduler.costs.as_dict()
            name = layout.draft if scheduler.config.drafts_at_end else None if drafter is None else drafter.name
            stats["speculation"] = _draft_stats(name, scheduler.speculation)
            for stage, memory in zip(stats["stages"], scheduler.kv.budget.stages, strict=False):
                stage["kv_budget_bytes"] = memory.budget_bytes
                stage["kv_bytes"] = memory.bytes_of(scheduler.kv.used)
                stage["kv_bytes_stored"] = memory.bytes_of(scheduler.kv.stored)
        for stage, codec in zip(stats["stages"], self.pipeline.codecs, strict=False):
            stage["codec"] = codec  # of the link to the next
        for stage, ready in zip(stats["stages"], self.pipeline.ready, strict=False):
            stage |= {
                "device": ready.device,
                "weight_bytes": ready.weight_bytes,
                "kv_bytes_per_token": ready.kv_bytes_per_token,
                "free_bytes_when_loaded": ready.free_bytes,
            }
        _add_ranks(stats, self.pipeline)
        return stats

    def health(self) -> PipelineHealth:
        """Return the state of the pipeline."""
        failure, lost = self._shared.failure, self._shared.lost_stage
        state = StageState.READY if failure is None else StageState.STOPPED
        stages = tuple(
            StageHealth(spec.name, spec.start, spec.end, StageState.LOST if spec.name == lost else state)
            for spec in self.layout.stages
        )
        if failure is not None:
            reason = "the pipeline has failed" if lost is None else f"stage {lost} was lost and did not come back"
            return PipelineHealth(stages, failure=reason)
        busy, is_changing = self.pipeline.busy_name, self._shared.is_changing
        waits_for = "another cut of the layers" if is_changing else None
        if lost is not None:
            waits_for, is_changing = f"stage {lost}, for up to {self._rejoin_timeout:.0f} s", False
        elif busy is not None:
            waits_for, is_changing = f"{busy}, which does not answer; its machine does", False
        return PipelineHealth(stages, waits_for, is_changing=is_changing, absent=self._shared.absent)

    @property
    def layout(self) -> Layout:
        """The layout in force, also while another one is tried."""
        return self.pipeline.layout if self._shared.in_force is None else self._shared.in_force.layout

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. It exists once the stages are loaded."""
        return self._shared.scheduler

    # -- the thread --------------------------------------------------------------------------

    @clears_streams()
    def _run(self) -> None:
        qos.serve_requests()
        shared, loop, absent, reason = self._shared, None, None, FinishReason.ERROR
        housekeeping = Housekeeping(shared.inbox)
        housekeeping.watch_machine(is_needed=True)  # loading takes minutes
        failure: SplitinferError = PeerError("the pipeline was closed")
        try:
            loop = self._opened(housekeeping)
            self._started.set()
            absent = Absent(loop, self.pipeline, shared, self._replan, self._leave_after)
            reopening = Reopening(
                loop, shared, self.pipeline, self.figures, self._configure, self._rejoin_timeout, absent
            )
            while True:
                reopening.turn()
        except Stop:
            reason = FinishReason.ABORT
            shared.failure = failure  # so that no thread waits for a result that will not come
            if loop is not None:
                self._save_last_kv(loop)
        except SplitinferError as error:
            failure = error
        except Exception as error:
            if not shared.is_closing:  # else ``close`` has closed the pipeline while the loop used it
                log.exception("the engine failed")
            failure = SplitinferError(f"the coordinator failed ({type(error).__name__}: {error})")
        finally:
            if loop is None:
                shared.fail(failure)
            else:
                loop.requests.end_all(reason, failure)
                loop.close()
            self._started.set()
            try:
                self.figures.count()  # also draws the last steps in the trace
            finally:
                self.pipeline.close("the coordinator is done" if reason is FinishReason.ABORT else str(failure))
                if absent is not None:
                    absent.close()
                housekeeping.close()

    def _opened(self, housekeeping: Housekeeping[StageEvent | Call]) -> Loop:
        """Open the pipeline, and return its loop."""
        drafter = self._shared.drafter = self._draft()  # first, because the stages then report the free memory
        self.pipeline.open()
        self.figures.opened(self.pipeline.layout, time.monotonic())
        scheduler = Scheduler(self._configure(self.pipeline))
        return Loop(self._shared, self.pipeline, self.figures, housekeeping, drafter, scheduler)

    def _save_last_kv(self, loop: Loop) -> None:
        """Save the KV of the last answers if KV is stored on disk, for at most ``_SAVE`` seconds."""
        if not (self._keeps_on_disk and self.pipeline.is_open):
            return
        try:
            loop.empty(_SAVE)
        except (SplitinferError, Stop) as error:
            log.info("the last KV could not be saved: %s", error)
        except Exception:
            if self.pipeline.is_open:  # else it took too long, and ``close`` has closed the pipeline meanwhile
                log.exception("the last KV could not be saved")


def _add_ranks(stats: dict[str, Any], pipeline: Pipeline) -> None:
    for rank in pipeline.ranks:
        if rank.ready is None:
            continue
        stage = stats["stages"][rank.stage]
        stage["sum_seconds"] = max(stage.get("sum_seconds", 0.0), rank.ready.sum_seconds)
        stage.setdefault("ranks", []).append(
            {
                "name": rank.spec.name,
                "device": rank.ready.device,
                "weight_bytes": rank.ready.weight_bytes,
                "free_bytes_when_loaded": rank.ready.free_bytes,
                "busy_seconds": rank.busy,
            }
        )


def _draft_stats(drafter: str | None, speculation: Speculation) -> dict[str, Any] | None:
    """Return how many drafts were made, how many were right, and their costs. Return None without a drafter."""
    if drafter is None:
        return None
    costs = speculation.costs
    return {
        "drafter": drafter,
        **speculation.counts.as_dict(),
        "round_seconds": costs.drafts.measured,
        "draft_seconds": costs.drafting(1) if costs.drafts.num_seen else None,
        "link_seconds": costs.hop,
        "step_seconds_by_rows": [stage.measured for stage in costs.stages],
    }


def _queue_stats(scheduler: Scheduler) -> dict[str, Any]:
    """Return the scheduler's bounds, and the numbers of its requests and blocks by state."""
    return {
        "policy": scheduler.config.policy_config.policy.value,
        "token_budget": scheduler.config.token_budget,
        "max_running": scheduler.config.max_running,
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "stored_blocks": len(scheduler.prefix_cache.tree),
        "fetched_tokens": scheduler.prefix_cache.num_fetched,
        "swapped_tokens": scheduler.prefix_cache.num_swapped,
        "read_seconds_per_token": scheduler.prefix_cache.seconds_per_token,
        "preemptions": scheduler.num_preemptions,
        "grouping": scheduler.chooser.as_dict(),
    }
