"""S stages on a virtual clock, driven by the scheduler as the engine drives the real ones.

A step of n tokens takes ``a + b * n`` seconds on a stage; a stage runs one step at a time, in order, and what it
sends arrives ``link`` seconds later, at the next stage or, from the last one, at the scheduler. The scheduler sits
beside stage 0: it is asked for the next plan whenever something happened. All stages carry out all plans on toy
caches of their own, and the last one's answers count.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from toy import ToyStage

from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.scheduler import Scheduler, SchedulerConfig
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True)
class Stage:
    """Seconds: ``a`` for each step, ``b`` for each of its tokens, ``link`` to whoever comes next."""

    a: float
    b: float
    link: float


@dataclass
class Busy:
    """When a stage computed: [start, end) of each step, and how many tokens it had."""

    spans: list[tuple[float, float, int]] = field(default_factory=list)

    def duty(self, start: float, end: float) -> float:
        return sum(max(0.0, min(end, e) - max(start, s)) for s, e, _ in self.spans) / (end - start)


class PipelineSim:
    """Run until nothing happens any more. Times in seconds on the virtual clock."""

    def __init__(self, config: SchedulerConfig, stages: list[Stage], check: bool = True) -> None:
        self.scheduler, self.stages, self._checks = Scheduler(config), stages, check
        self.toys = [ToyStage(whole_blocks=config.blocks.whole_blocks) for _ in stages]
        self.busy = [Busy() for _ in stages]
        self.now = 0.0
        self.times: dict[int, list[float]] = {}  # of each token, by sequence
        self.tokens: dict[int, list[int]] = {}
        self._free_at = [0.0] * len(stages)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def submit(self, time: float, seq: Sequence) -> None:
        def add() -> None:
            self.scheduler.add(seq)
            self.times[seq.seq_id], self.tokens[seq.seq_id] = [], []

        self.at(time, add)

    def run(self, max_events: int = 1_000_000) -> None:
        for _ in range(max_events):
            if not self._events:
                assert self.scheduler.is_idle, "the pipeline stands still and somebody waits"
                return
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._plan()
            if self._checks:
                self.scheduler.check()
        raise AssertionError("it never ends")

    def _plan(self) -> None:
        """Plans go out while there are any; stage 0 takes them one after the other."""
        while True:
            could = self.scheduler.can_schedule
            plan = self.scheduler.schedule()
            assert (plan is not None) == could
            if plan is None:
                return
            self._arrive(0, plan)

    def _arrive(self, stage: int, plan: StepPlan) -> None:
        costs = self.stages[stage]
        start = max(self.now, self._free_at[stage])
        end = start + (costs.a + costs.b * plan.num_tokens if plan.slices else 0.0)
        self._free_at[stage] = end
        self.busy[stage].spans.append((start, end, plan.num_tokens))
        result = self.toys[stage].run(plan)
        if stage + 1 < len(self.stages):
            self.at(end + costs.link, lambda: self._arrive(stage + 1, plan))
        else:
            self.at(end + costs.link, lambda: self._learn(result))

    def _learn(self, result: StepResult) -> None:
        for event in self.scheduler.update(result):
            self.times[event.seq_id].append(self.now)
            self.tokens[event.seq_id].append(event.token.token_id)
