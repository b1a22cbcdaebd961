"""What the pipeline did, from the figures that every step brings back anyway.

``Totals`` are counters since the start. A ``Record`` knows the order of things: it puts each step's times on the
coordinator's clock (``core.metrics.clocks``), says what every gap between two steps was for (``core.metrics.gaps``),
and how long tokens took. It looks at a *window*: since the start, or since it was last reset.

The first stage's gap needs to know what its step had waited for. The loop says when it finds nothing to plan
(``blocked``); of what comes then, the first thing is taken for the cause that a plan was possible again, because
the loop tries anew after each.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from splitinfer.core.metrics.clocks import ClockReading, Clocks
from splitinfer.core.metrics.gaps import ALWAYS, Activity, Cause, StageGaps, Visit
from splitinfer.core.metrics.histogram import LogHistogram
from splitinfer.core.plan import Slice, StageFigures, StepPlan, StepResult
from splitinfer.engine.coordinator.trace import Trace, TracedStep

_FAR = 1e12  # seconds; no clock says more


@dataclass(slots=True)
class StageTotals:
    """One stage's sums: seconds computing, steps, bytes of hidden states sent on, rows of them that the link's codec
    could not hold, and bytes of stored KV copied, in ``copying`` seconds."""

    busy: float = 0.0
    steps: int = 0
    bytes_sent: int = 0
    rows_unfit: int = 0
    bytes_copied: int = 0
    copying: float = 0.0


@dataclass(slots=True)
class Totals:
    """Everything since the start; ``active`` is the seconds in which any request was under way.

    ``away``: seconds between a step's end on the coordinator's own layers and the arrival of its result,
    added up over the steps. With one stream, what is left of it after the other stages' ``busy`` is the
    links'; what is left of ``active`` after it and the own ``busy`` is the loop's.
    """

    stages: list[StageTotals]
    active: float = 0.0
    away: float = 0.0
    computed_tokens: int = 0  # rows that went through the stages
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    rejoins: int = 0  # times a lost worker came back
    finished: dict[str, int] = field(default_factory=dict)
    _active_since: float | None = None

    def step(self, result: StepResult, now: float) -> None:
        """Add one step, whose result has just come."""
        for figures in result.figures:
            if figures.stage == 0:  # its clock is ours
                self.away += now - figures.ended
            if 0 <= figures.stage < len(self.stages):
                stage = self.stages[figures.stage]
                stage.busy += figures.ended - figures.started
                stage.steps += 1
                stage.bytes_sent += figures.bytes_sent
                stage.rows_unfit += figures.unfit
                stage.bytes_copied += figures.bytes_copied
                stage.copying += figures.copying

    def is_active(self, active: bool, now: float) -> None:
        """Say whether any request is under way."""
        if self._active_since is not None:
            self.active += now - self._active_since
        self._active_since = now if active else None

    def as_dict(self, names: Sequence[str], now: float) -> dict[str, Any]:
        """Plain numbers for ``LLM.stats``."""
        since = self._active_since  # read once: the engine's thread may change it
        active = self.active + (now - since if since is not None else 0.0)
        sent = sum(stage.bytes_sent for stage in self.stages)
        return {
            "active_seconds": active,
            "away_seconds": self.away,
            "computed_tokens": self.computed_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "rejoins": self.rejoins,
            "finished": dict(self.finished),
            "bytes_per_token": sent / self.computed_tokens if self.computed_tokens else 0.0,
            "stages": [
                {
                    "name": name,
                    "busy_seconds": stage.busy,
                    "busy_percent": 100 * stage.busy / active if active else 0.0,
                    "steps": stage.steps,
                    "bytes_sent": stage.bytes_sent,
                    "rows_unfit": stage.rows_unfit,
                    "bytes_copied": stage.bytes_copied,
                    "copy_seconds": stage.copying,
                }
                for name, stage in zip(names, self.stages, strict=True)
            ],
        }


# -- the record ------------------------------------------------------------------------------------


class _News(NamedTuple):
    """A result, or something else, that came to the loop: made, sent, heard, in seconds on the coordinator's clock."""

    made: float
    sent: float
    heard: float


_NOT_WAITED_FOR = _News(ALWAYS, ALWAYS, ALWAYS)


class _Flight(NamedTuple):
    """A plan under way, its kind if that is to be drawn, and what it had waited for."""

    plan: StepPlan
    kind: str
    news: _News


@dataclass(slots=True)
class _Reader:
    """How far a request is: its prompt's length, its last token or submission, the positions computed for it."""

    num_prompt_tokens: int
    last: float
    has_token: bool = False
    computed: int = 0


@dataclass(slots=True)
class _Window:
    """What is counted since ``since``."""

    since: float
    stages: list[StageGaps]
    steps: int = 0
    tokens: int = 0
    useful: int = 0
    ttft: LogHistogram = field(default_factory=LogHistogram)
    itl: LogHistogram = field(default_factory=LogHistogram)

    @classmethod
    def of(cls, num_stages: int, since: float) -> "_Window":
        waits_for = (Cause.DOWNSTREAM, *(Cause.UPSTREAM for _ in range(num_stages - 1)))
        return cls(since, [StageGaps(cause, since) for cause in waits_for])


class PipelineMetrics:
    """The last window. The engine's thread writes, any thread may read (``snapshot``). Times in seconds."""

    def __init__(self, names: Sequence[str], now: float, trace: Trace | None = None) -> None:
        self._names, self._trace = tuple(names), trace
        self._lock = threading.Lock()
        self._activity = Activity()
        self._clocks = Clocks(())
        self._is_whole = True
        self._flights: deque[_Flight] = deque()
        self._readers: dict[int, _Reader] = {}
        self._news: _News | None = _NOT_WAITED_FOR  # None: nothing could be planned, and nothing has come since
        self._window = _Window.of(len(names), now)

    # -- requests ----------------------------------------------------------------------------

    def submitted(self, seq_id: int, num_prompt_tokens: int, at: float, now: float) -> None:
        """A request has come in, which was submitted ``at``."""
        with self._lock:
            self._readers[seq_id] = _Reader(num_prompt_tokens, at)
            if self._is_whole:
                self._activity.begin(now)

    def token(self, seq_id: int, now: float) -> None:
        """A request got a token."""
        reader = self._readers[seq_id]
        with self._lock:
            times = self._window.itl if reader.has_token else self._window.ttft
            times.add(now - reader.last)
        reader.last, reader.has_token = now, True

    def ended(self, seq_id: int, now: float) -> None:
        """A request is over."""
        with self._lock:
            self._readers.pop(seq_id, None)
            if not self._readers:
                self._activity.stop(now)

    # -- steps -------------------------------------------------------------------------------

    def blocked(self) -> None:
        """Nothing can be planned now."""
        self._news = None

    def heard(self, at: float) -> None:
        """Something came to the loop that may let it plan again."""
        if self._news is None:
            self._news = _News(at, at, at)

    def launched(self, plan: StepPlan) -> None:
        """The first stage begins a step."""
        kind = self._kind(plan) if self._trace is not None else ""
        self._flights.append(_Flight(plan, kind, self._news or _NOT_WAITED_FOR))
        self._news = _NOT_WAITED_FOR

    def _kind(self, plan: StepPlan) -> str:
        num_decodes = sum(map(self._decodes, plan.slices))
        if num_decodes == 0:
            return "prefill" if plan.slices else "free"
        return "decode" if num_decodes == len(plan.slices) else "mixed"

    def _decodes(self, part: Slice) -> bool:
        reader = self._readers.get(part.seq_id)
        is_decode = len(part.token_ids) == 1 or bool(part.num_drafts)
        return reader is not None and is_decode and part.start >= reader.num_prompt_tokens

    def returned(self, result: StepResult, heard: float) -> None:
        """A result has come; before its requests are told, because who has ended by then did not want it."""
        if not self._flights or self._flights[0].plan.step != result.step:
            return  # of no plan of ours; the scheduler says so
        flight = self._flights.popleft()
        sampled = {each.seq_id: len(each.tokens) for each in result.sampled}
        useful = sum(self._new_rows(part, sampled.get(part.seq_id, 0)) for part in flight.plan.slices)
        if not _is_plausible(result.figures, len(self._names)):
            self.heard(heard)
            return
        last = result.figures[-1]
        if len(self._names) > 1:
            self._clocks.follow(result.figures, heard)
            made, sent = (self._clocks.here(last.stage, time) for time in (last.ended, last.sent))
        else:
            made = sent = heard = last.ended
        visits = self._visits(flight, result.figures, useful)
        with self._lock:
            self._count(flight, visits, useful)
        if self._news is None:
            self._news = _News(made, sent, heard)
        if self._trace is not None:
            sizes = [each.bytes_sent for each in result.figures]
            plan = flight.plan
            self._trace.step(
                TracedStep(
                    plan.step, flight.kind, len(plan.slices), plan.num_tokens, useful, visits, sizes, sent, heard
                )
            )

    def _new_rows(self, part: Slice, num_sampled: int) -> int:
        """Rows that were wanted when they came, and had not been computed before; of drafts, the right ones."""
        reader = self._readers.get(part.seq_id)
        if reader is None:
            return 0
        end, before = part.end, reader.computed
        if part.num_drafts:
            end += num_sampled - part.num_logits
        if end <= before:
            return 0
        reader.computed = end
        return end - max(part.start, before)

    def _visits(self, flight: _Flight, figures: Sequence[StageFigures], useful: int) -> list[Visit]:
        here, tokens, news = self._clocks.here, flight.plan.num_tokens, flight.news
        first = figures[0]
        visits = [Visit(news.made, news.sent, news.heard, first.started, first.ended, tokens, useful)]
        sent = first.sent
        for i, each in enumerate(figures[1:], 1):
            received, start, end = here(i, each.received), here(i, each.started), here(i, each.ended)
            visits.append(Visit(visits[-1].end, sent, received, start, end, tokens, useful))
            sent = here(i, each.sent)
        return visits

    def _count(self, flight: _Flight, visits: Sequence[Visit], useful: int) -> None:
        window = self._window
        for stage, visit in zip(window.stages, visits, strict=True):
            stage.add(visit, self._activity)
        self._activity.forget(min(stage.until for stage in window.stages))
        if visits[-1].end > window.since:
            window.steps += 1
            window.tokens += flight.plan.num_tokens
            window.useful += useful

    # -- all stages --------------------------------------------------------------------------

    def opened(self, clocks: Clocks, now: float) -> None:
        """All stages are there for the first time: the first window begins."""
        self.resumed(clocks, now)
        with self._lock:
            self._window = _Window.of(len(self._names), now)

    def resumed(self, clocks: Clocks, now: float) -> None:
        """All stages are there."""
        with self._lock:
            self._clocks, self._is_whole = clocks, True
            self._news = _NOT_WAITED_FOR
            if self._readers:
                self._activity.begin(now)

    def lost(self, now: float) -> None:
        """A stage is gone, and what was under way with it; until all are back, nobody could do anything."""
        with self._lock:
            self._flights.clear()
            self._is_whole = False
            self._activity.stop(now)

    def snapshot(self, now: float, *, reset: bool = False) -> dict[str, Any]:
        """The window as plain numbers; with ``reset`` another one begins."""
        with self._lock:
            window = self._window
            found = {
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
                self._window = _Window.of(len(self._names), now)
        return found


def _stage_dict(stage: StageGaps) -> dict[str, Any]:
    return {
        "busy_seconds": stage.busy,
        "gap_seconds": stage.gaps,
        "duty_percent": 100 * stage.duty,
        "goodput_duty_percent": 100 * stage.goodput,
        "gaps": {
            cause.value: {"seconds": times.total, **times.as_dict(50, 99)} for cause, times in stage.by_cause.items()
        },
    }


def _clock_dict(reading: ClockReading) -> dict[str, float]:
    return {"clock_offset_seconds": reading.offset, "clock_uncertainty_seconds": reading.uncertainty}


def _is_plausible(figures: Sequence[StageFigures], num_stages: int) -> bool:
    """Whether every stage reports, in order and with times that can be added: workers are not trusted."""
    return len(figures) == num_stages and all(
        each.stage == i and sum(map(abs, (each.started, each.ended, each.received, each.sent, each.copying))) < _FAR
        for i, each in enumerate(figures)
    )
