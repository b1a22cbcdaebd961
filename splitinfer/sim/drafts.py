"""Drafts for several streams, simulated: what the live choice of groups and drafts gives, beside fixed choices.

Each stream has a short prompt and an endless answer; figures are those of a window in which all of them decode. The
*optimum* is the best of all fixed choices, found by trying them: every number of groups, every number of drafts for
each member, and blocks in flight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.sequence import Sequence as Stream
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.machine.machine import Machine
from splitinfer.sim.simulator import Simulator, config_of

_PROMPT = 16  # tokens
_MOST_DRAFTS = 10
_SEED = 1
_STEPS = 10  # of one row through all stages, after which is looked whether a simulation is over


@dataclass(frozen=True, slots=True)
class Choice:
    """``groups`` and ``flight`` of all streams; ``None``: as the live choice has it."""

    groups: int | None = None
    flight: Flight | None = None


LIVE = Choice()


@dataclass(frozen=True, slots=True)
class Crowd:
    """Streams side by side. ``acceptance``: of each; ``tokens``: of each answer, of which the first quarter is not
    counted; ``by_place``: see ``Simulator``."""

    machine: Machine
    acceptance: tuple[float, ...]
    tokens: int = 400
    by_place: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """``rate``: tokens per second of all streams; ``rates``: of each; ``gaps``: seconds between two tokens, ordered;
    ``per_token``: mean seconds a token of each stream, ordered; ``groups``, ``drafts``: in use at the end, by the live
    choice."""

    rate: float
    rates: tuple[float, ...]
    gaps: tuple[float, ...]
    groups: int
    drafts: tuple[int, ...]

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens of a stream, in seconds."""
        return self.gaps[-1]

    @property
    def slowest(self) -> float:
        """Seconds a token of the slowest stream."""
        return 1 / min(self.rates)


def run(crowd: Crowd, choice: Choice = LIVE) -> Figures:
    simulator = _simulator(crowd, choice)
    for seq_id, _ in enumerate(crowd.acceptance):
        params = SamplingParams(max_tokens=50 * crowd.tokens)
        simulator.submit(0.0, Stream(seq_id, [0] * _PROMPT, params, 0, flight=choice.flight))
    times = [served.token_times for _, served in sorted(simulator.served.items())]
    a_while = _STEPS * sum(stage.at(Shape(1)) for stage in crowd.machine.stages)
    while min(map(len, times)) < crowd.tokens // 4:
        simulator.run(simulator.now + a_while)
    begin = simulator.now
    while min(map(len, times)) < crowd.tokens:
        simulator.run(simulator.now + a_while)
    end = simulator.now
    counted = [[at for at in each if begin < at <= end] for each in times]
    rates = tuple(len(each) / (end - begin) for each in counted)
    gaps = sorted(b - a for each in counted for a, b in pairwise(each))
    chooser = simulator.scheduler.state.chooser
    drafts = tuple(chooser.flights.get(seq_id, OFF).first for seq_id in range(len(times)))
    return Figures(sum(rates), rates, tuple(gaps), simulator.scheduler.batches.active, drafts)


def _simulator(crowd: Crowd, choice: Choice) -> Simulator:
    config = config_of(
        crowd.machine,
        num_groups=choice.groups or crowd.machine.num_stages,
        token_budget=512,
        max_running=len(crowd.acceptance),
        max_len=2**40,
        speculates=choice.flight is None or not choice.flight.is_off,
        fixed_groups=choice.groups is not None,
    )
    acceptance = dict(enumerate(crowd.acceptance))
    return Simulator(Scheduler(config), crowd.machine, acceptance=acceptance, seed=_SEED, by_place=crowd.by_place)


def without_drafts(crowd: Crowd) -> dict[int, Figures]:
    """Figures without drafts, by the number of groups."""
    most = min(crowd.machine.num_stages, len(crowd.acceptance))
    return {groups: run(crowd, Choice(groups, OFF)) for groups in range(1, most + 1)}


def fixed_choices(crowd: Crowd) -> Iterator[Choice]:
    """Every fixed choice with drafts, the same for all streams."""
    stages = crowd.machine.num_stages
    for groups in range(1, min(stages, len(crowd.acceptance)) + 1):
        for count in range(1, _MOST_DRAFTS + 1):
            for in_flight in range(1, -(-stages // groups) + 1):
                yield Choice(groups, Flight(count, count if in_flight > 1 else 0, in_flight))


def optimum(crowd: Crowd, longest: float | None = None) -> tuple[Choice, Figures]:
    """The fixed choice with the most tokens per second; ``longest``: of those whose longest gap is no longer."""
    tried = [(choice, run(crowd, choice)) for choice in fixed_choices(crowd)]
    allowed = [one for one in tried if longest is None or one[1].longest_gap <= longest]
    none = [(Choice(groups, OFF), figures) for groups, figures in without_drafts(crowd).items()]
    return max([*allowed, *none], key=lambda one: one[1].rate)
