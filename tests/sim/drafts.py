"""Several streams, simulated: tokens per second by the live choice of groups and drafts, or by a fixed one.

Each stream has a short prompt and an endless answer; rates are those of a window in which all of them decode.
"""

from dataclasses import dataclass

from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import OFF, Flight
from tests.emulation.machine import Machine
from tests.sim.simulator import Simulator, config_of

_PROMPT = 16  # tokens
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


def rate(crowd: Crowd, choice: Choice = LIVE) -> float:
    """Tokens per second of all streams."""
    return sum(rates(crowd, choice))


def without_drafts(crowd: Crowd) -> list[float]:
    """Tokens per second of each stream without drafts, in the best number of groups."""
    most = min(crowd.machine.num_stages, len(crowd.acceptance))
    return max((rates(crowd, Choice(groups, OFF)) for groups in range(1, most + 1)), key=sum)


def rates(crowd: Crowd, choice: Choice = LIVE) -> list[float]:
    """Tokens per second of each stream."""
    simulator = _simulator(crowd, choice)
    for seq_id, _ in enumerate(crowd.acceptance):
        params = SamplingParams(max_tokens=50 * crowd.tokens)
        simulator.submit(0.0, Sequence(seq_id, [0] * _PROMPT, params, 0, flight=choice.flight))
    times = [served.token_times for _, served in sorted(simulator.served.items())]
    a_while = _STEPS * sum(stage.at(Shape(1)) for stage in crowd.machine.stages)
    while min(map(len, times)) < crowd.tokens // 4:
        simulator.run(simulator.now + a_while)
    begin = simulator.now
    while min(map(len, times)) < crowd.tokens:
        simulator.run(simulator.now + a_while)
    return [sum(begin < at <= simulator.now for at in each) / (simulator.now - begin) for each in times]


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
