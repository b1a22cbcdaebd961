"""The coordinator's loop: plan, run, learn. One thread, which alone touches MLX.

    take what came in        submissions, aborts, results
    plan                     the scheduler writes the next step, if a stage can take it
    run                      launch it on the own layers; pass the step before it on to the next stage
    learn                    a result gives tokens; tokens go to their readers

Launching a step before waiting for the one before it keeps the device fed; ``max_in_flight`` plans keep
every stage fed. When the pipeline fails, every request ends with the same one sentence.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from splitinfer.core.plan import StepResult
from splitinfer.core.scheduler import Scheduler, SchedulerConfig
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.figures import StageTotals, Totals
from splitinfer.engine.pipeline import Event, Pipeline
from splitinfer.engine.requests import RequestState
from splitinfer.engine.stage_runner import Launched
from splitinfer.engine.threads import join
from splitinfer.errors import PeerError, SplitinferError

log = logging.getLogger(__name__)

Call = Callable[[], None]


class _Stop(Exception):
    """The loop was asked to end."""


class Engine:
    """Runs a pipeline for many requests.

    ``build`` makes the pipeline, given where to put its events; ``configure`` makes the scheduler's
    bounds once the stages are known. Both run on the engine's thread.
    """

    def __init__(
        self, build: Callable[[Callable[[Event], None]], Pipeline], configure: Callable[[Pipeline], SchedulerConfig]
    ) -> None:
        self._inbox: queue.SimpleQueue[Event | Call] = queue.SimpleQueue()
        self._requests: dict[int, RequestState] = {}
        self._under_way: Launched | None = None
        self._started = threading.Event()
        self._closing = threading.Lock()
        self.failure: SplitinferError | None = None
        self.totals = Totals([])
        self.pipeline = build(self._inbox.put)
        self._scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._run, args=(configure,), name="engine", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Block until all stages are loaded.

        Raises:
            SplitinferError: what kept them from it.
        """
        while not self._started.wait(timeout=0.5):
            pass
        if self.failure is not None:
            raise self.failure

    def submit(self, state: RequestState) -> None:
        """Hand a request in; its events begin to come.

        Raises:
            SplitinferError: the pipeline has failed or was closed.
        """
        with self._closing:
            if self.failure is not None:
                raise self.failure
            self._inbox.put(lambda: self._add(state))

    def abort(self, seq_id: int) -> None:
        """End a request where it is; nothing happens if it has ended."""
        self._inbox.put(lambda: self._abort(seq_id))

    def drop_session(self, session: str) -> None:
        """Free what a session keeps."""
        self._inbox.put(lambda: self.scheduler.drop(session))

    def close(self, timeout: float) -> None:
        """End the loop, then the pipeline; requests under way end as aborted."""
        self._inbox.put(self._raise_stop)
        if not join(self._thread, timeout):
            # The loop is inside a long step; the links can be ended from here.
            self.pipeline.close("the coordinator was stopped")

    def stats(self) -> dict[str, Any]:
        """Counters and per-stage figures, as plain numbers."""
        stats = self.totals.as_dict([spec.name for spec in self.pipeline.layout.stages], time.monotonic())
        for stage, ready in zip(stats["stages"], self.pipeline.ready, strict=False):
            stage |= {
                "device": ready.device,
                "weight_bytes": ready.weight_bytes,
                "kv_bytes_per_token": ready.kv_bytes_per_token,
                "free_bytes_when_loaded": ready.free_bytes,
            }
        return stats

    @property
    def scheduler(self) -> Scheduler:
        """There once the stages are ready."""
        assert self._scheduler is not None
        return self._scheduler

    # -- the loop ----------------------------------------------------------------------------

    def _run(self, configure: Callable[[Pipeline], SchedulerConfig]) -> None:
        reason = FinishReason.ERROR
        try:
            self.pipeline.open()
            self._scheduler = Scheduler(configure(self.pipeline))
            self.totals = Totals([StageTotals() for _ in range(self.pipeline.num_stages)])
            self._started.set()
            while True:
                self._turn()
        except _Stop:
            self.failure, reason = PeerError("the pipeline was closed"), FinishReason.ABORT
        except SplitinferError as error:
            self.failure = error
        except Exception as error:
            log.exception("the engine failed")
            self.failure = SplitinferError(f"the coordinator failed ({type(error).__name__}: {error})")
        finally:
            self._end_all(reason)
            self._started.set()
            self.pipeline.close("the coordinator is done" if reason is FinishReason.ABORT else str(self.failure))

    def _turn(self) -> None:
        """Take in, plan, run, learn: one step goes out at most."""
        self._take_events()
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            self.totals.computed_tokens += plan.num_tokens
            launched = self.pipeline.launch(plan)
        under_way, self._under_way = self._under_way, launched
        if under_way is not None:
            self._learn(self.pipeline.pass_on(under_way))

    def _take_events(self) -> None:
        """Everything that has come; waits for the first only when there is nothing else to do."""
        nothing_to_do = self._under_way is None and not self.scheduler.can_schedule
        while True:
            try:
                event = self._inbox.get(block=nothing_to_do)
            except queue.Empty:
                return
            if isinstance(event, tuple):
                self._learn(self.pipeline.hear(event))
            else:
                event()
            nothing_to_do = False

    def _learn(self, result: StepResult | None) -> None:
        if result is None:
            return
        events = self.scheduler.update(result)
        self.totals.step(result)
        for event in events:
            state = self._requests.get(event.seq_id)
            if state is None:
                continue  # a stop string ended it with an earlier token of this step
            self.totals.generated_tokens += 1
            reason = state.take(event.token, event.finish_reason)
            if reason is not None:
                self.scheduler.finish(event.seq_id, reason)
                self._forget(event.seq_id, reason)

    # -- requests ----------------------------------------------------------------------------

    def _raise_stop(self) -> None:
        raise _Stop

    def _add(self, state: RequestState) -> None:
        self._requests[state.seq_id] = state
        self.totals.is_active(True, time.monotonic())
        self.scheduler.add(state.sequence)

    def _abort(self, seq_id: int) -> None:
        if self.scheduler.finish(seq_id, FinishReason.ABORT):
            self._requests[seq_id].end(FinishReason.ABORT)
            self._forget(seq_id, FinishReason.ABORT)

    def _forget(self, seq_id: int, reason: FinishReason) -> None:
        sequence = self._requests.pop(seq_id).sequence
        self.totals.prompt_tokens += sequence.num_prompt_tokens
        self.totals.cached_tokens += sequence.num_reused
        self.totals.finished[reason.value] = self.totals.finished.get(reason.value, 0) + 1
        self.totals.is_active(bool(self._requests), time.monotonic())

    def _end_all(self, reason: FinishReason) -> None:
        """Nobody waits for a pipeline that is gone: who was in it, and who was still on the way in, hears so."""
        with self._closing:
            error = str(self.failure) if reason is FinishReason.ERROR else None
            while not self._inbox.empty():
                event = self._inbox.get()
                if not isinstance(event, tuple) and self._scheduler is not None and event != self._raise_stop:
                    event()
            for state in self._requests.values():
                state.end(reason, error)
            self._requests.clear()
