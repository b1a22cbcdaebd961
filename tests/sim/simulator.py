"""The coordinator's loop and all stages on a virtual clock, with the live scheduler.

    coordinator    take in messages | draft | plan | launch | ...      one thing at a time
    stages         one step each, in order of arrival
    hops           any number of steps at a time, whose rows leave one after the other

Where a device computes while its host goes on (``Machine.launches_ahead``), each stage has a queue
(``emulation.device_queue``). A launch holds the thread that launches as long as the queue does; a step's result leaves
when the step is done, whatever that thread is doing. Drafts stand in the first stage's queue, behind its steps, or in
the last one's, behind the step whose tokens they follow (``Machine.drafts_at_end``). Where
a device computes while launching, the coordinator is busy until a step has ended, and then sends it.

Messages that arrive while the coordinator is busy or held are taken in afterwards, as in the engine; so a token's time
is when its reader gets it. Deterministic for a seed: only which drafts are right is random.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.speculation import Draft, Proposal
from tests.core import invariants
from tests.emulation.device_queue import DeviceQueue, DeviceTraits, Timing
from tests.emulation.machine import Machine

_STRETCH = 50  # tokens
_TARGET, _WRONG = 0, 1  # the token that is always sampled, and a wrong draft


class Answers:
    """The last stage's results. It always samples the same token, so a draft is right if it is that one."""

    def __init__(self) -> None:
        self._last_position: dict[int, int] = {}  # of the token that was sampled last

    def to(self, plan: StepPlan) -> tuple[tuple[SampledSlice, ...], tuple[Slice, ...]]:
        """What is sampled for a plan, and the slices that are computed for it: all but the void ones."""
        for seq_id in plan.ended:
            self._last_position.pop(seq_id, None)
        sampled, computed = list[SampledSlice](), list[Slice]()
        for part in plan.slices:
            if part.is_rejected(self._last_position.get(part.seq_id, -1), _TARGET):
                sampled.append(SampledSlice(part.seq_id, ()))
                continue
            computed.append(part)
            if part.num_logits:
                count = part.num_accepted([_TARGET] * part.num_logits)
                self._last_position[part.seq_id] = part.end - part.num_logits + count
                sampled.append(SampledSlice(part.seq_id, tuple(SampledToken(_TARGET) for _ in range(count))))
        return tuple(sampled), tuple(computed)


class _Places:
    """Which places of a text have right drafts: the same share of every ``_STRETCH``, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._right: dict[tuple[int, int], frozenset[int]] = {}

    def is_right(self, seq_id: int, place: int, share: float) -> bool:
        """Whether the draft at a place of a sequence is right."""
        stretch, at = divmod(place, _STRETCH)
        if (seq_id, stretch) not in self._right:
            drawn = Random(f"{self._seed} {seq_id} {stretch}").sample(range(_STRETCH), round(share * _STRETCH))
            self._right[seq_id, stretch] = frozenset(drawn)
        return at in self._right[seq_id, stretch]


def config_of(machine: Machine, **more: Any) -> SchedulerConfig:
    """The scheduler's config for a machine, as the live system sets it. No two prompts of a simulation are the same."""
    usual = {
        "num_groups": machine.num_stages,
        "num_stages": machine.num_stages,
        "max_in_flight": machine.num_stages + 1,
        "blocks": PrefixCacheConfig(keeps_blocks=False),
        "drafts_at_end": machine.drafts_at_end,
        "drafts_at_once": machine.drafts_at_once,
    }
    return SchedulerConfig(**{**usual, **more})


class Simulator:
    """Runs a scheduler on a machine until nothing is left to do. ``acceptance``: the share of drafts that are right,
    for all requests or by id; ``by_place``: whether a draft is right depends on its place in the text alone, so that
    machines can be compared without luck; ``offered``: how often the drafter has a draft at all, as one that looks
    them up; ``check``: whether to check the scheduler's invariants after each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        machine: Machine,
        *,
        acceptance: float | Mapping[int, float] = 0.0,
        seed: int = 0,
        by_place: bool = False,
        offered: float = 1.0,
        check: bool = False,
    ) -> None:
        self.scheduler, self.machine = scheduler, machine
        self.now = 0.0
        self.times: dict[int, list[float]] = {}  # of each request's tokens
        self.busy: list[list[tuple[float, float]]] = [[] for _ in machine.stages]  # start and end of each step
        self.offered = offered
        self._acceptance, self._random, self._checks = acceptance, Random(seed), check
        self._places = _Places(seed) if by_place else None
        self._answers = Answers()
        traits = machine.device if machine.launches_ahead else DeviceTraits()
        self._queues = [DeviceQueue(traits) for _ in machine.stages]
        self._sent = [0.0] * machine.num_stages  # when the last step's rows had left for the next stage
        self._in_line: list[deque[tuple[StepPlan, float]]] = [deque() for _ in machine.stages]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._inbox: list[Callable[[], None]] = []
        self._figures: dict[int, list[StageFigures]] = {}
        self._count = 0

    # -- requests ------------------------------------------------------------------------------

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Have the coordinator call ``call`` as soon as it takes in messages after ``time``."""
        self._at(time, lambda: self._inbox.append(call))

    def submit(self, time: float, seq: Sequence) -> None:
        self.times[seq.seq_id] = []
        self.at(time, lambda: self.scheduler.add(seq))

    def run(self, until: float = float("inf")) -> None:
        """Run up to ``until``, or until nothing is left to do.

        Raises:
            AssertionError: a request waits for ever.
        """
        while self.now < until:
            self._take_in()
            self._draft()
            plan = self.scheduler.schedule(self.now)
            if plan is not None:
                self._compute(plan)
            elif self._events:
                self._advance(self._events[0][0])
            else:
                assert self.scheduler.is_idle, "a request waits, and nothing is under way"
                return
            if self._checks:
                invariants.check(self.scheduler)

    # -- the coordinator -----------------------------------------------------------------------

    def _take_in(self) -> None:
        while self._inbox:
            self._inbox.pop(0)()

    def _draft(self) -> None:
        """Make the drafts that the scheduler proposes, round by round, and take in messages after each round; if these
        void some, those that are proposed then."""
        speculation = self.scheduler.speculation
        if self.machine.drafts_at_end:
            return
        are_overtaken = True
        while are_overtaken and (proposals := self.scheduler.proposals()):
            served = [one for one in proposals if self.offered == 1 or self._random.random() < self.offered]
            while drafting := [one for one in served if len(one.drafts) < one.count and one.stands]:
                speculation.costs.drafted(len(drafting), 1, self._make_round(len(drafting)))
                for proposal in drafting:
                    proposal.drafts.append(Draft(self.guess(proposal)))
                self._take_in()
            speculation.asked(proposals)
            are_overtaken = not all(proposal.stands for proposal in proposals)
            for proposal in proposals:
                self.scheduler.take_drafts(proposal)

    def guess(self, proposal: Proposal) -> int:
        """The next draft for a proposal; for subclasses."""
        return _TARGET if self.is_right(proposal) else _WRONG

    def is_right(self, proposal: Proposal) -> bool:
        """Whether the next draft for a proposal is right."""
        return self._is_right(proposal.seq.seq_id, proposal.position + len(proposal.drafts))

    def _is_right(self, seq_id: int, place: int) -> bool:
        given = self._acceptance
        share = given if isinstance(given, float | int) else given[seq_id]
        if self._places is not None:
            return self._places.is_right(seq_id, place, share)
        return self._random.random() < share

    def _make_round(self, sequences: int) -> float:
        """Wait for a draft for each of some sequences, which stands in line behind the first stage's steps on a device
        that launches ahead; the seconds that its device took."""
        seconds = self.machine.draft_round(sequences)
        if not self.machine.launches_ahead:
            self._advance(self.now + seconds)
            return seconds
        timing = self._queues[0].launch(self.now, seconds, self.machine.draft_buffers)
        self._advance(timing.done)
        return timing.ended - timing.started

    def _compute(self, plan: StepPlan) -> None:
        """Plan and launch a step on the coordinator's layers."""
        self._advance(self.now + self.machine.host)
        if self.machine.launches_ahead:
            self._launch(plan)
            return
        step, timing = self.scheduler.in_flight[-1], self._step(0, plan, plan.slices)
        self._advance(timing.ended)
        step.is_sent = True
        self.carried_out(0, plan)
        self._pass_on(0, plan, timing.ended)

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step, and hold the coordinator as long as its device does. The result leaves when it is done."""
        self.carried_out(0, plan)
        step, timing = self.scheduler.in_flight[-1], self._step(0, plan, plan.slices)

        def leave() -> None:
            step.is_sent = True
            self._pass_on(0, step.plan, timing.done)

        self._at(timing.done, leave)
        self._advance(timing.returns)

    # -- the stages ----------------------------------------------------------------------------

    def carried_out(self, stage: int, plan: StepPlan) -> None:
        """Called when a stage takes in a plan; for subclasses."""

    def sampled(self, plan: StepPlan) -> tuple[tuple[SampledSlice, ...], tuple[Slice, ...]]:
        """What the last stage samples for a plan, and the slices that it computes."""
        return self._answers.to(plan)

    def _step(self, stage: int, plan: StepPlan, slices: tuple[Slice, ...], received: float = 0.0) -> Timing:
        """Launch a step on a stage. A worker that is held in a launch launches it later, but before its device is free,
        so this makes no difference."""
        shape = Shape.of(slices)
        seconds = self.machine.stages[stage].at(shape) if slices else 0.0
        timing = self._queues[stage].launch(self.now, seconds, self.machine.buffers_of(stage) if slices else 1)
        self.busy[stage].append((timing.started, timing.ended))
        figures = StageFigures(stage, timing.started, timing.ended, received, rows=shape.rows, sent=timing.done)
        self._figures.setdefault(plan.step, []).append(figures)
        return timing

    def _pass_on(self, stage: int, plan: StepPlan, done: float) -> None:
        if self.machine.num_stages == 1:
            sampled, _ = self.sampled(plan)
            sampled, done = self._draft_behind(plan, sampled, done)
            self._answer(plan, sampled, done)
            return
        hop = self.machine.hops[stage]
        self._sent[stage] = max(done, self._sent[stage]) + hop.per_row * plan.num_tokens
        arrives = self._sent[stage] + hop.fixed
        self._at(arrives, lambda: self._arrive(stage + 1, plan, arrives))

    def _arrive(self, stage: int, plan: StepPlan, received: float) -> None:
        """A step is there. In the middle it waits in line until the device is free, for what is void may be known by
        then."""
        if stage + 1 == self.machine.num_stages:
            self._begin(stage, plan, received)
        else:
            self._in_line[stage].append((plan, received))
            self._serve(stage)

    def _serve(self, stage: int) -> None:
        """Begin the steps that wait at a stage in the middle, in the order in which they came."""
        line = self._in_line[stage]
        while line and self._queues[stage].free_at <= self.now:
            plan, received = line.popleft()
            self._begin(stage, plan, received)
        if line:
            self._at(self._queues[stage].free_at, lambda: self._serve(stage))

    def _begin(self, stage: int, plan: StepPlan, received: float) -> None:
        is_last = stage + 1 == self.machine.num_stages
        self.carried_out(stage, plan)
        sampled, slices = self.sampled(plan) if is_last else ((), plan.slices)
        timing = self._step(stage, plan, slices, received)
        if is_last:
            sampled, done = self._draft_behind(plan, sampled, timing.done)
            self._answer(plan, sampled, done + self.machine.hops[stage].fixed)
        else:
            self._pass_on(stage, plan, timing.done)

    def _draft_behind(
        self, plan: StepPlan, sampled: tuple[SampledSlice, ...], done: float
    ) -> tuple[tuple[SampledSlice, ...], float]:
        """The last stage's results with the drafts that it makes behind a step, and when they are done."""
        asked = {part.seq_id: part for part in plan.slices if part.num_next}
        drafted = [one for one in sampled if one.seq_id in asked and one.tokens]
        if not drafted:
            return sampled, done
        figures, rounds = self._figures[plan.step], max(asked[one.seq_id].num_next for one in drafted)
        rounds = 1 if self.machine.drafts_at_once else rounds
        seconds = rounds * self.machine.draft_round(len(drafted))
        timing = self._queues[-1].launch(self.now, seconds, rounds * self.machine.draft_buffers)
        figures[-1] = replace(figures[-1], drafting=seconds, sent=timing.done)
        return tuple(self._with_drafts(one, asked.get(one.seq_id)) for one in sampled), timing.done

    def _with_drafts(self, one: SampledSlice, part: Slice | None) -> SampledSlice:
        if part is None or not one.tokens:
            return one
        first = part.end - part.num_logits + len(one.tokens) + 1
        places = range(first, first + part.num_next)
        return replace(one, drafts=tuple(_TARGET if self._is_right(one.seq_id, at) else _WRONG for at in places))

    def _answer(self, plan: StepPlan, sampled: tuple[SampledSlice, ...], returned_at: float) -> None:
        result = StepResult(plan.step, sampled, tuple(self._figures.pop(plan.step)))
        self._at(returned_at, lambda: self._inbox.append(lambda: self._update(result, returned_at)))

    def _update(self, result: StepResult, returned_at: float) -> None:
        events = self.scheduler.update(result, returned_at)
        self.scheduler.learn()
        for event in events:
            self.times[event.seq_id].append(self.now)
            self.got(event.seq_id, event.token.token_id)

    def got(self, seq_id: int, token_id: int) -> None:
        """Called when a request gets a token; for subclasses."""

    # -- time ----------------------------------------------------------------------------------

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _advance(self, to: float) -> None:
        """Let time pass, and with it all events but the coordinator's own work."""
        while self._events and self._events[0][0] <= to:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, to)
