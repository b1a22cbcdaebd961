"""Situations of a pipeline, staged in virtual time: the live scheduler and metrics on machines that are described.

What the engine's loop tells its metrics, the simulated one tells them here; the trace is written by the real writer.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.metrics.clocks import ClockReading, Clocks
from splitinfer.core.metrics.recent import RecentSteps
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason, SamplingParams
from splitinfer.core.sequence import Sequence as Request
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.coordinator.stats import stats_of
from splitinfer.engine.coordinator.trace import Trace
from splitinfer.machine.machine import Machine
from splitinfer.server.page.figures import Sample
from splitinfer.sim.simulator import Simulator

NAMES = ("studio", "mini", "air")


@dataclass(frozen=True)
class Asked:
    """A request: when it comes, its prompt's tokens, and its answer's."""

    at: float = 0.0
    prompt: int = 8
    answer: int = 100_000


@dataclass(frozen=True)
class Situation:
    """``lags``: seconds in which a step lies on a stage before its host starts it. ``window``: the seconds looked at.
    ``config``: further options of the scheduler. ``at``: calls to the scheduler's user, such as an abort."""

    machine: Machine
    asked: Sequence[Asked] = (Asked(),)
    window: tuple[float, float] = (2.0, 6.0)
    lags: tuple[float, ...] = (0.0, 0.0, 0.0)
    config: dict[str, Any] = field(default_factory=dict)
    flight: Flight | None = None
    acceptance: float = 0.0


class Staged(Simulator):
    """A simulation that is measured as the live pipeline is. ``requests``: when each was heard of; ``spells``: when any
    was under way."""

    def __init__(self, situation: Situation, trace: Trace) -> None:
        machine, count = situation.machine, situation.machine.num_stages
        config = SchedulerConfig(
            **{
                "num_groups": count, "max_in_flight": count + 1, "token_budget": 64, "max_running": 16,
                "max_len": 1_000_000, "num_stages": count, "fixed_groups": True,
                "speculates": situation.flight is not None, **situation.config,
            }
        )  # fmt: skip
        super().__init__(Scheduler(config), machine, acceptance=situation.acceptance, seed=1)
        names = NAMES[:count]
        self.recent, self.lags, self.requests, self.spells = RecentSteps(), situation.lags, list[float](), list[Any]()
        self.figures = Figures(names, 0.0, trace)
        self.figures.opened(Clocks([ClockReading(0.0, 0.0)] * (count - 1)), 0.0)
        self.figures.watch(self.recent)
        specs = [
            StageSpec(name, 4 * i, 4 * i + 4, None if i == 0 else f"tcp://there:{i}") for i, name in enumerate(names)
        ]
        self.layout = Layout(tuple(specs), name="staged")
        self._under_way = set[int]()
        self._tell_when_blocked()
        for seq_id, asked in enumerate(situation.asked):
            params = SamplingParams(max_tokens=asked.answer)
            self.submit(asked.at, Request(seq_id, [0] * asked.prompt, params, 0, flight=situation.flight))

    def _tell_when_blocked(self) -> None:
        schedule = self.scheduler.schedule

        def told(now: float) -> StepPlan | None:
            plan = schedule(now)
            if plan is None:
                self.figures.blocked()
            return plan

        self.scheduler.schedule = told  # type: ignore[method-assign]

    def submit(self, time: float, seq: Request) -> None:
        super().submit(time, seq)

        def heard() -> None:
            self.figures.heard(self.now)
            self.requests.append(self.now)
            if not self._under_way:
                self.spells.append([self.now, float("inf")])
            self._under_way.add(seq.seq_id)
            self.figures.submitted(seq, time, self.now)

        self.at(time, heard)

    def _compute(self, plan: StepPlan) -> None:
        self.figures.launched(self.scheduler.newest)
        super()._compute(plan)

    def _arrive(self, stage: int, plan: StepPlan, received: float) -> None:
        if not self.lags[stage]:
            super()._arrive(stage, plan, received)
        else:
            arrive = super()._arrive
            self._at(self.now + self.lags[stage], lambda: arrive(stage, plan, received))

    def _update(self, result: StepResult, returned_at: float) -> None:
        step = self.scheduler.oldest
        assert step is not None
        self.figures.returned(step, result, returned_at)
        super()._update(result, returned_at)

    def got(self, seq_id: int, token_id: int) -> None:
        self.figures.token(seq_id, self.now)
        reason = self._sequences[seq_id].finish_reason
        if reason is not None and seq_id in self._under_way:
            self._ended(seq_id, reason)

    def abort(self, seq_id: int) -> None:
        """Its reader has gone."""
        self.scheduler.finish(seq_id, FinishReason.ABORT)
        self._ended(seq_id, FinishReason.ABORT)

    def _ended(self, seq_id: int, reason: FinishReason) -> None:
        self._under_way.discard(seq_id)
        self.figures.ended(self._sequences[seq_id], reason, self.now)
        if not self._under_way:
            self.spells[-1][1] = self.now

    # -- what the page looks at ----------------------------------------------------------------

    def health(self) -> PipelineHealth:
        stages = [StageHealth(spec.name, spec.start, spec.end, StageState.READY) for spec in self.layout.stages]
        return PipelineHealth(tuple(stages))

    def sample(self) -> Sample:
        pipeline, drafter = SimpleNamespace(codecs=(), ready=()), SimpleNamespace(name="ngram")
        speculates = self.scheduler.config.speculates
        stats = stats_of(
            cast(Any, pipeline), self.layout, self.scheduler, cast(Any, drafter) if speculates else None,
            self.figures, self.now, reset=False,
        )  # fmt: skip
        budget = self.scheduler.config.kv or KVBudget()
        return Sample(self.now, stats, self.layout, self.health(), budget, self.recent.take())


@dataclass(frozen=True)
class Looked:
    """What was seen between two samples. ``steps``: of that time."""

    before: Sample
    after: Sample
    staged: Staged


def look(situation: Situation, trace: Path, then: Callable[[Staged], None] = lambda _: None) -> Looked:
    """Stage a situation. ``then``: what happens in it, told before it begins."""
    with closing(Trace(trace)) as writer:
        writer._zero = 0  # the virtual clock begins there
        staged = Staged(situation, writer)
        then(staged)
        staged.run(situation.window[0])
        before = staged.sample()
        staged.run(situation.window[1])
        return Looked(before, staged.sample(), staged)
