"""The figures of a pipeline. The loop reports events; each step, and each request that has ended, becomes a record for
the counters, the trace and the watching function.

    requests    submitted ... ended
    steps       returned
    stages      opened ... lost, or paused for another cut ... opened

The loop reports events in order. They are counted later, when the loop is idle or a thread asks, so that counting does
not delay the next step. One thread at a time counts or reads.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from splitinfer.core.layout import Layout
from splitinfer.core.metrics.gaps import ALWAYS, Activity, Arrivals, Cause, StageTime, Visit
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.metrics.records import Gained, RequestRecord, Rows, StepRecord
from splitinfer.core.plan import Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight, TokenEvent
from splitinfer.core.scheduler.retry_after import UsualRequest
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.figures.totals import Totals
from splitinfer.engine.figures.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")
StepWatch = Callable[[StepRecord], object]
_Came = tuple[float, float, float]  # the times when a result was computed, sent and received

_MOST = 256  # events that may wait to be counted; with more, a loop that is never idle counts them at once
_NOT_WAITED_FOR: _Came = (ALWAYS, ALWAYS, ALWAYS)


def _later(count: "Callable[Concatenate[Figures, P], None]") -> "Callable[Concatenate[Figures, P], None]":
    """Return a method that queues its event, so that ``count`` is called for it later, in order."""

    @wraps(count)
    def put(self: "Figures", /, *args: P.args, **named: P.kwargs) -> None:
        self.events.append(partial(count, self, *args, **named))
        if len(self.events) > _MOST:
            self.count()

    return put


class Figures:
    """Counts the events that the loop's thread reports; any thread may read.

    now: seconds on the monotonic clock, as all times here. trace: the trace file for all steps.
    ``watch``: called with each step's record, on the thread that counts it; ``None``: no function watches.
    ``events``: reported events that are not counted yet.
    """

    def __init__(self, layout: Layout, now: float, trace: Trace | None = None) -> None:
        self.watch: StepWatch | None = None
        self.events: deque[Callable[[], None]] = deque()
        self._counting = threading.Lock()
        self._trace = trace
        self._requests: dict[int, RequestRecord] = {}
        self._activity = Activity()
        self._totals = Totals()
        self._cut, self._is_whole, self._is_lost = -1, True, False
        self._begin_cut(layout, now)
        self._begin_again(now)

    # -- told by the loop --------------------------------------------------------------------

    @_later
    def submitted(self, sequence: Sequence, at: float, now: float) -> None:
        """Count a request that was submitted at ``at`` and has reached the loop."""
        self._requests[sequence.seq_id] = RequestRecord(sequence, at, at)
        self._totals.is_active(True, now)
        if self._is_whole:
            self._activity.begin(now)

    @_later
    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Count the end of a request."""
        self._totals.request(self._requests.pop(sequence.seq_id), reason, now)
        if not self._requests:
            self._totals.is_active(False, now)
            self._activity.stop(now)

    @_later
    def returned(
        self, step: StepInFlight, result: StepResult, tokens: Iterable[TokenEvent], heard: float, now: float
    ) -> None:
        """Count a step. Its result arrived at ``heard``, and its ``tokens`` go to their readers ``now``."""
        (rows, useful), figures = self._rows(step.plan, result), tuple(result.figures)
        visits = self._visits(self._trigger(step), figures, heard)
        gaps = [stage.add(visit, self._activity) for stage, visit in zip(self._stages, visits, strict=True)]
        self._activity.forget(min(stage.until for stage in self._stages))
        self._tell(
            StepRecord(
                number=step.plan.step,
                num_sequences=len(step.plan.slices),
                rows=rows,
                useful=useful,
                gained=self._gained(tokens, now),
                visits=visits,
                figures=figures,
                gaps=gaps,
                sent=self._results[-1][1],
                heard=heard,
                cut=self._cut,
            )
        )

    @_later
    def opened(self, layout: Layout, now: float) -> None:
        """Note that all stages are open: for the first time, again, or with another cut."""
        if layout != self._layout:
            self._begin_cut(layout, now)
        self._begin_again(now)
        self._totals.counts["rejoins"] += self._is_lost
        self._is_whole, self._is_lost = True, False

    @_later
    def paused(self, now: float) -> None:
        """Note that the stages are closed for another cut. Until ``opened`` no time counts as active."""
        self._is_whole = False
        self._activity.stop(now)

    @_later
    def lost(self, stage: str | None, now: float) -> None:
        """Count the loss of a stage, and of the steps in flight. ``stage``: ``None`` if it is not known."""
        self._is_whole, self._is_lost = False, True
        self._activity.stop(now)
        self._totals.lost(stage)

    # -- counted later -----------------------------------------------------------------------

    def _begin_cut(self, layout: Layout, now: float) -> None:
        self._layout, count = layout, layout.num_stages
        self._cut += 1
        self._stages = [StageTime(Cause.UPSTREAM if stage else Cause.DOWNSTREAM, now) for stage in range(count)]
        self._totals.begin_cut(count)
        if self._trace is not None:
            self._trace.begin([spec.name for spec in layout.stages])

    def _begin_again(self, now: float) -> None:
        self._arrivals = Arrivals()
        self._results: deque[_Came] = deque()  # the results since a launch
        self._launched_at = ALWAYS
        if self._requests:
            self._activity.begin(now)

    def _tell(self, step: StepRecord) -> None:
        self._totals.step(step)
        if self._trace is not None:
            self._trace.step(step)
        watch = self.watch  # read once: another thread may change it
        if watch is not None:
            watch(step)

    def _rows(self, plan: StepPlan, result: StepResult) -> tuple[Rows, int]:
        """Return a step's rows by kind, and how many of them are useful. A row is useful if its request was open until
        this step and the row was not computed before. A draft's row is useful if the draft was accepted."""
        sampled = {each.seq_id: len(each.tokens) for each in result.sampled}
        decode = draft = useful = 0
        for part in plan.slices:
            request, size = self._requests.get(part.seq_id), len(part.token_ids)
            is_answer = request is None or part.start >= request.sequence.num_prompt_tokens
            if is_answer and (part.num_drafts or size == 1):
                decode += size - part.num_drafts
                draft += part.num_drafts
            elif request is not None and request.sequence.is_ballot(part):
                draft += size
            if request is not None:
                useful += _new_rows(part, sampled.get(part.seq_id, 0), request)
        return Rows(plan.num_tokens - decode - draft, decode, draft), useful

    def _gained(self, tokens: Iterable[TokenEvent], now: float) -> list[Gained]:
        counts: dict[int, int] = {}
        for each in tokens:
            counts[each.seq_id] = counts.get(each.seq_id, 0) + 1
        gained: list[Gained] = []
        for seq_id, count in counts.items():
            request = self._requests[seq_id]
            seq, seconds, request.last = request.sequence, now - request.last, now
            if request.first is None:
                request.first = now
                gained.append(Gained(seq_id, count, seconds, seq.num_prompt_tokens, seq.num_cached or 0))
            else:
                gained.append(Gained(seq_id, count, seconds))
        return gained

    def _trigger(self, step: StepInFlight) -> _Came:
        """Return the result that made a step possible: the first one received since the previous launch."""
        results, at = self._results, ALWAYS if step.launched_at is None else step.launched_at
        while results and results[0][2] <= self._launched_at:
            results.popleft()
        self._launched_at = at
        return results[0] if results and results[0][2] <= at else _NOT_WAITED_FOR

    def _visits(self, trigger: _Came, figures: Seq[StageFigures], heard: float) -> list[Visit]:
        """Return the times of a step on each stage, and note when its result arrived."""
        first, sent = figures[0], figures[0].sent
        visits = [Visit(*trigger, first.started, first.ended)]
        for each, received in zip(figures[1:], self._arrivals.of(figures, heard), strict=True):
            ahead = each.received - received
            visits.append(Visit(visits[-1].end, sent, received, each.started - ahead, each.ended - ahead))
            sent = each.sent - ahead
        end = visits[-1].end
        self._results.append((end, sent, heard) if len(visits) > 1 else (end, end, end))
        return visits

    # -- readings ----------------------------------------------------------------------------

    def count(self) -> None:
        """Count all events reported so far."""
        self._after_counting(lambda: None)

    def _after_counting(self, read: Callable[[], T]) -> T:
        """Count all events reported so far, and return the result of ``read``. Nothing is counted during ``read``."""
        with self._counting:
            while self.events:
                self.events.popleft()()
            return read()

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the counters as plain numbers, for ``LLM.stats``."""
        return self._after_counting(lambda: {**self._totals.as_dict(now), **self._of_stages(now)})

    def _of_stages(self, now: float) -> dict[str, Any]:
        active = self._totals.active_seconds(now)
        stages = [
            {
                "name": spec.name,
                "busy_seconds": time.busy,
                "busy_percent": 100 * time.busy / active if active else 0.0,
                "idle_seconds": {cause.value: seconds for cause, seconds in time.idle.items()},
                **sums,
            }
            for spec, time, sums in zip(self._layout.stages, self._stages, self._totals.stages, strict=True)
        ]
        return {"cut": self._cut, "stages": stages}

    @property
    def generated_tokens(self) -> int:
        """Tokens that readers got since the start."""
        return self._after_counting(lambda: int(self._totals.counts["generated_tokens"]))

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        return self._after_counting(lambda: self._totals.usual_request)

    def histograms(self) -> dict[str, Histogram]:
        """Return copies of the histograms of requests since the start, by the names of ``totals.BOUNDS``."""
        return self._after_counting(lambda: {name: each.copy() for name, each in self._totals.histograms.items()})


def _new_rows(part: Slice, num_sampled: int, request: RequestRecord) -> int:
    """Return the number of useful rows of a slice, and note them as computed."""
    if part.num_drafts and not num_sampled:  # void: an earlier slice of its request had a wrong draft
        return 0
    if request.sequence.is_ballot(part):
        return 0
    end, before = part.end, request.computed
    if part.num_drafts:
        end += num_sampled - part.num_logits
    if end <= before:
        return 0
    request.computed = end
    return end - max(part.start, before)
