"""What the stages did in a *window*: since the start, or since the last reset; from the figures that every step returns
with its result.

Each step's times are put on the coordinator's clock (``core.metrics.clocks``), every gap between two steps is
attributed to a cause (``core.metrics.gaps``), and how long tokens took is counted.

For the first stage's gap it must be known what its step had waited for. The loop reports when it finds nothing to plan
(``blocked``); the first event after that (``heard``) counts as what made a plan possible again, because the loop tries
anew after each event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.metrics.clocks import ClockReading, Clocks
from splitinfer.core.metrics.gaps import ALWAYS, Activity, Cause, StageGaps, Visit
from splitinfer.core.metrics.histogram import LogHistogram
from splitinfer.core.metrics.recent import RecentSteps, Rows, SeenStep
from splitinfer.core.metrics.requests import RequestUnderWay
from splitinfer.core.plan import Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight, Trigger
from splitinfer.engine.coordinator.trace import Trace, TracedStep

_NOT_WAITED_FOR = Trigger(ALWAYS, ALWAYS, ALWAYS)


@dataclass(slots=True)
class _Window:
    """What has been counted since ``since``. ``number``: how many windows were before it. ``idle_before``: each stage's
    gaps by cause before, in seconds."""

    number: int
    since: float
    stages: list[StageGaps]
    idle_before: list[dict[Cause, float]]
    steps: int = 0
    tokens: int = 0
    useful: int = 0
    ttft: LogHistogram = field(default_factory=LogHistogram)
    itl: LogHistogram = field(default_factory=LogHistogram)

    @classmethod
    def of(cls, number: int, num_stages: int, since: float) -> "_Window":
        waits_for = (Cause.DOWNSTREAM, *(Cause.UPSTREAM for _ in range(num_stages - 1)))
        nothing = [dict.fromkeys(Cause, 0.0) for _ in waits_for]
        return cls(number, since, [StageGaps(cause, since) for cause in waits_for], nothing)

    @property
    def idle(self) -> list[dict[Cause, float]]:
        """Each stage's gaps by cause, those before among them, in seconds."""
        return [
            {cause: seconds + stage.by_cause[cause].total for cause, seconds in before.items()}
            for before, stage in zip(self.idle_before, self.stages, strict=True)
        ]


class PipelineMetrics:
    """Figures of the current window, times in seconds. Used by one thread at a time, but for ``watch``.

    ``requests``: those under way.
    """

    def __init__(
        self, names: Sequence[str], now: float, requests: Mapping[int, RequestUnderWay], trace: Trace | None = None
    ) -> None:
        self._names, self._trace = tuple(names), trace
        self._recent: RecentSteps | None = None
        self._activity = Activity()
        self._clocks = Clocks(())
        self._is_whole = True
        self._requests = requests
        self._trigger: Trigger | None = _NOT_WAITED_FOR  # None: nothing could be planned, and no event has come since
        self._window = _Window.of(0, len(names), now)

    # -- requests ----------------------------------------------------------------------------

    def submitted(self, now: float) -> None:
        """A request has reached the loop."""
        if self._is_whole:
            self._activity.begin(now)

    def token(self, request: RequestUnderWay, now: float) -> None:
        """A request has a token. Call before its record knows."""
        times = self._window.ttft if request.first is None else self._window.itl
        times.add(now - request.last)

    def ended(self, now: float) -> None:
        """A request is not under way any more."""
        if not self._requests:
            self._activity.stop(now)

    # -- steps -------------------------------------------------------------------------------

    def blocked(self) -> None:
        """Nothing can be planned now."""
        self._trigger = None

    def heard(self, at: float) -> None:
        """An event reached the loop that may let it plan again."""
        if self._trigger is None:
            self._trigger = Trigger(at, at, at)

    def launched(self, step: StepInFlight) -> None:
        """The first stage has begun a step."""
        step.rows = None if self._trace is None and self._recent is None else self._rows(step.planned)
        step.trigger = self._trigger or _NOT_WAITED_FOR
        self._trigger = _NOT_WAITED_FOR

    def watch(self, recent: RecentSteps | None) -> None:
        """Put every step that is launched from now on into ``recent``, too; ``None`` ends that. From any
        thread."""
        self._recent = recent

    def _rows(self, plan: StepPlan) -> Rows:
        decodes = [part for part in plan.slices if self._decodes(part)]
        rows, drafts = sum(len(part.token_ids) for part in decodes), sum(part.num_drafts for part in decodes)
        return Rows(plan.num_tokens - rows, rows - drafts, drafts)

    def _decodes(self, part: Slice) -> bool:
        request = self._requests.get(part.seq_id)
        is_decode = len(part.token_ids) == 1 or bool(part.num_drafts)
        return request is not None and is_decode and part.start >= request.sequence.num_prompt_tokens

    def returned(self, step: StepInFlight, result: StepResult, heard: float) -> None:
        """A step's result has arrived. Call before its tokens reach their requests: rows of a request that had
        ended before are not useful."""
        sampled = {each.seq_id: len(each.tokens) for each in result.sampled}
        useful = sum(self._new_rows(part, sampled.get(part.seq_id, 0)) for part in step.planned.slices)
        came = self._came(result.figures, heard)
        visits = self._visits(step, result.figures, useful)
        gaps, window = self._count(step, visits, useful), self._window.number
        if self._trigger is None:
            self._trigger = came
        if step.rows is not None:
            shown = SeenStep(step.planned.step, step.rows, useful, visits, gaps, window)
            self._show(shown, step.planned, result.figures, (came.sent, came.heard))

    def _came(self, figures: Sequence[StageFigures], heard: float) -> Trigger:
        """When a step's result was made, sent and heard."""
        last = figures[-1]
        if len(self._names) == 1:
            return Trigger(last.ended, last.ended, last.ended)
        self._clocks.follow(figures, heard)
        return Trigger(self._clocks.here(last.stage, last.ended), self._clocks.here(last.stage, last.sent), heard)

    def _show(
        self, step: SeenStep, plan: StepPlan, figures: Sequence[StageFigures], way_back: tuple[float, float]
    ) -> None:
        """Show a step to whoever looks at single ones."""
        recent = self._recent  # read once: another thread may change it
        if recent is not None:
            recent.put(step)
        if self._trace is not None:
            sizes, count, kind = [each.bytes_sent for each in figures], len(plan.slices), step.rows.kind
            traced = TracedStep(plan.step, kind, count, plan.num_tokens, step.useful, step.visits, sizes, *way_back)
            self._trace.step(traced)

    def _new_rows(self, part: Slice, num_sampled: int) -> int:
        """Rows that the request still wanted and that had not been computed before; of drafts, the accepted ones."""
        request = self._requests.get(part.seq_id)
        if request is None or (part.num_drafts and not num_sampled):  # void: what was wrong is behind its beginning
            return 0
        end, before = part.end, request.computed
        if part.num_drafts:
            end += num_sampled - part.num_logits
        if end <= before:
            return 0
        request.computed = end
        return end - max(part.start, before)

    def _visits(self, step: StepInFlight, figures: Sequence[StageFigures], useful: int) -> list[Visit]:
        here, tokens, trigger = self._clocks.here, step.planned.num_tokens, step.trigger or _NOT_WAITED_FOR
        first = figures[0]
        visits = [Visit(trigger.made, trigger.sent, trigger.heard, first.started, first.ended, tokens, useful)]
        sent = first.sent
        for i, each in enumerate(figures[1:], 1):
            received, start, end = here(i, each.received), here(i, each.started), here(i, each.ended)
            visits.append(Visit(visits[-1].end, sent, received, start, end, tokens, useful))
            sent = here(i, each.sent)
        return visits

    def _count(self, step: StepInFlight, visits: Sequence[Visit], useful: int) -> list[dict[Cause, float]]:
        """Count a step; the gaps before it on each stage."""
        window = self._window
        gaps = [stage.add(visit, self._activity) for stage, visit in zip(window.stages, visits, strict=True)]
        self._activity.forget(min(stage.until for stage in window.stages))
        if visits[-1].end > window.since:
            window.steps += 1
            window.tokens += step.planned.num_tokens
            window.useful += useful
        return gaps

    # -- all stages --------------------------------------------------------------------------

    def opened(self, clocks: Clocks, now: float) -> None:
        """All stages are connected for the first time: the first window begins."""
        self.resumed(clocks, now)
        self._begin_window(now)

    def relaid(self, names: Sequence[str], now: float) -> None:
        """The stages are others, of these names: a window of theirs begins."""
        self._names = tuple(names)
        self._begin_window(now)
        if self._trace is not None:
            self._trace.begin(list(names))

    def resumed(self, clocks: Clocks, now: float) -> None:
        """All stages are connected."""
        self._clocks, self._is_whole = clocks, True
        self._trigger = _NOT_WAITED_FOR
        if self._requests:
            self._activity.begin(now)

    def lost(self, now: float) -> None:
        """A stage is lost, and the steps under way with it; until all are back, no time counts as active."""
        self._is_whole = False
        self._activity.stop(now)

    def snapshot(self, now: float, *, reset: bool = False) -> dict[str, Any]:
        """The window as plain numbers; with ``reset`` a new one begins."""
        window = self._window
        found = {
            "number": window.number,
            "seconds": now - window.since,
            "steps": window.steps,
            "computed_tokens": window.tokens,
            "useful_tokens": window.useful,
            "ttft_seconds": window.ttft.as_dict(50, 90, 99),
            "itl_seconds": window.itl.as_dict(50, 90, 99),
            "stages": [
                {"name": name, **_stage_dict(stage), **_clock_dict(reading)}
                for name, stage, reading in zip(self._names, window.stages, self._clocks.readings, strict=False)
            ],
        }
        if reset:
            self._begin_window(now)
            self._window.idle_before = window.idle
        return found

    def _begin_window(self, now: float) -> None:
        self._window = _Window.of(self._window.number + 1, len(self._names), now)

    def idle_seconds(self) -> list[dict[str, float]]:
        """Each stage's gaps by cause since the start, in seconds."""
        return [{cause.value: seconds for cause, seconds in stage.items()} for stage in self._window.idle]


def _stage_dict(stage: StageGaps) -> dict[str, Any]:
    return {
        "busy_seconds": stage.busy,
        "gap_seconds": stage.gaps,
        "duty_percent": 100 * stage.duty,
        "goodput_duty_percent": 100 * stage.goodput,
        "gaps": {
            cause.value: {"seconds": times.total, **times.as_dict(50, 99)} for cause, times in stage.by_cause.items()
        },
        "overhead": {"seconds": stage.overhead.total, **stage.overhead.as_dict(50, 99)},
    }


def _clock_dict(reading: ClockReading) -> dict[str, float]:
    return {"clock_offset_seconds": reading.offset, "clock_uncertainty_seconds": reading.uncertainty}
