"""What a pipeline did: the loop tells, each step and each request that has ended becomes a record, and counters, the
trace and whoever watches are given it.

    requests    submitted ... ended
    steps       returned
    stages      opened ... lost, or paused for another cut ... opened

The loop tells what happened, in order, and counts nothing itself: counting need not be done between a result and the
step that it allows, so it is put off until there is time or somebody asks. One thread at a time counts or reads.
"""

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from splitinfer.core.layout import Layout
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.metrics.recorder import Recorder
from splitinfer.core.metrics.records import StepRecord
from splitinfer.core.plan import StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.results import TokenEvent
from splitinfer.core.scheduler.room import UsualRequest
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.coordinator.totals import StageTotals, Totals
from splitinfer.engine.coordinator.trace import Trace

T = TypeVar("T")
Watch = Callable[[StepRecord], object]

_MOST = 256  # events that are counted later; a loop that is never idle counts them then


class Figures:
    """Counts what the loop's thread tells; any thread may read.

    now: seconds on the monotonic clock, as all times here. trace: where every step is drawn. watch: is given each step
    that is counted, on whichever thread that is; ``None``: nobody watches.
    """

    def __init__(self, layout: Layout, now: float, trace: Trace | None = None) -> None:
        self.watch: Watch | None = None
        self._events: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._counting = threading.Lock()
        self._layout, self._trace = layout, trace
        self._recorder = Recorder(layout.num_stages, now)
        self._totals = Totals([StageTotals() for _ in layout.stages])
        self._is_lost = False
        self._begin_trace()

    # -- told by the loop --------------------------------------------------------------------

    def submitted(self, sequence: Sequence, at: float, now: float) -> None:
        """A request was submitted at ``at``, and has reached the loop."""
        self._put(self._submitted, sequence, at, now)

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A request has ended."""
        self._put(self._ended, sequence, reason, now)

    def returned(
        self, step: StepInFlight, result: StepResult, tokens: Seq[TokenEvent], heard: float, now: float
    ) -> None:
        """A step's result arrived at ``heard``; its ``tokens`` go to their readers ``now``."""
        self._put(self._returned, step, result, tokens, heard, now)

    def opened(self, layout: Layout, now: float) -> None:
        """All stages are there, for the first time or again, or others are."""
        self._put(self._opened, layout, now)

    def paused(self, now: float) -> None:
        """The stages are closed for others."""
        self._put(self._recorder.lost, now)

    def lost(self, stage: str | None, now: float) -> None:
        """A stage is lost, and the steps under way with it. ``None``: it is not known which one."""
        self._put(self._lost, stage, now)

    def _put(self, count: Callable[..., None], *about: Any) -> None:
        self._events.append((count, about))
        if len(self._events) > _MOST:
            self.count()

    # -- counted later -----------------------------------------------------------------------

    def _submitted(self, sequence: Sequence, at: float, now: float) -> None:
        self._recorder.submitted(sequence, at, now)
        self._totals.is_active(True, now)

    def _ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._totals.request(self._recorder.ended(sequence, reason, now))
        self._totals.is_active(bool(self._recorder.under_way), now)

    def _returned(
        self, step: StepInFlight, result: StepResult, tokens: Seq[TokenEvent], heard: float, now: float
    ) -> None:
        record = self._recorder.returned(step, result, [each.seq_id for each in tokens], heard, now)
        self._totals.step(record)
        if self._trace is not None:
            self._trace.step(record)
        watch = self.watch  # read once: another thread may change it
        if watch is not None:
            watch(record)

    def _opened(self, layout: Layout, now: float) -> None:
        if layout == self._layout:
            self._recorder.resumed(now)
        else:
            self._layout = layout
            self._recorder.begin_cut(layout.num_stages, now)
            self._totals.stages = [StageTotals() for _ in layout.stages]
            self._begin_trace()
        self._totals.rejoins += self._is_lost
        self._is_lost = False

    def _lost(self, stage: str | None, now: float) -> None:
        self._recorder.lost(now)
        self._totals.lost(stage)
        self._is_lost = True

    def _begin_trace(self) -> None:
        if self._trace is not None:
            self._trace.begin([spec.name for spec in self._layout.stages])

    # -- readings ----------------------------------------------------------------------------

    def count(self) -> None:
        """Count everything told so far."""
        self._after_counting(lambda: None)

    def _after_counting(self, read: Callable[[], T]) -> T:
        """Count everything told so far; the result of ``read``, during which nothing is counted."""
        with self._counting:
            while self._events:
                count, about = self._events.popleft()
                count(*about)
            return read()

    def as_dict(self, now: float) -> dict[str, Any]:
        """Counters as plain numbers, for ``LLM.stats``."""
        return self._after_counting(lambda: {**self._totals.as_dict(now), **self._of_stages(now)})

    def _of_stages(self, now: float) -> dict[str, Any]:
        active = self._totals.active_seconds(now)
        stages = [
            {
                "name": spec.name,
                "busy_seconds": time.busy,
                "busy_percent": 100 * time.busy / active if active else 0.0,
                "idle_seconds": {cause.value: seconds for cause, seconds in time.idle.items()},
                "steps": sums.steps,
                "bytes_sent": sums.bytes_sent,
                "rows_unfit": sums.rows_unfit,
                "bytes_copied": sums.bytes_copied,
                "copy_seconds": sums.copying,
            }
            for spec, time, sums in zip(self._layout.stages, self._recorder.stages, self._totals.stages, strict=True)
        ]
        return {"cut": self._recorder.cut, "stages": stages}

    @property
    def generated_tokens(self) -> int:
        """Sequence that readers got since the start."""
        return self._after_counting(lambda: self._totals.generated_tokens)

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        return self._after_counting(lambda: self._totals.usual_request)

    def histograms(self) -> dict[str, Histogram]:
        """Times and sizes of requests, since the start."""
        return self._after_counting(self._totals.read_histograms)
