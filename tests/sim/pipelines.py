"""What the live scheduler gives in virtual time on a described machine, or on a cut of measured ones.

A simulated token costs some tenths of a millisecond, so no more of them are simulated than figures need: a stretch in
the middle of an answer. Without drafts every step is like the one before it, and few tokens do; with drafts there is
luck, and a choice to be learned.
"""

from collections.abc import Sequence as Many
from statistics import harmonic_mean

from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import costs_of, drafting, hop_ends, hop_of
from splitinfer.placement.plan import Planner
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator, config_of

_SETTLED = 0.25  # of an answer: what is not counted of its rate, while the choice of drafts is learned
_WINDOW, _STEADY = 120, 48  # tokens of each of many streams, with drafts; of a rate without
_PROMPT = 16  # tokens of each of many streams
_STEPS = 10  # of one row through all stages, after which is looked whether a simulation is over


def pipeline_of(profiles: Profiles, cut: Cut, host: float = 0.0) -> Machine:
    """A cut as a machine. ``host``: the coordinator's own seconds of a step."""
    draft, model = profiles.model.draft, profiles.model
    one, more = drafting(profiles, cut.machines[-1])
    hops = tuple(Hop(*hop_of(profiles, a, b)) for a, b in hop_ends(cut))
    if len(hops) == 1:  # which a step takes only where ranks compute it
        host += hops[0].fixed
    return Machine(
        stages=tuple(costs_of(model, profiles.machines[m], start, end) for m, start, end in cut.stages()),
        hops=hops,
        layers=cut.layers,
        host=host,
        draft=one,
        draft_more=more,
        launches_ahead=profiles.machines[0].launches_ahead,
        buffers=tuple(2 * count for count in cut.layers),
        drafts_at_end=draft is not None and draft.like is not None,
        drafts_at_once=0 if draft is None else draft.at_once,
    )


def turn(machine: Machine, asked: Asked, budget: int, acceptance: float | None) -> float:
    """Seconds from a prompt until the last token of its answer, alone. With drafts the answer's seconds are those at
    its usual rate: the first requests pay for trying numbers of drafts, later ones do not."""
    return prompt(machine, budget, asked.prompt) + (asked.answer - 1) / rate(machine, asked, budget, acceptance)


def rate(machine: Machine, asked: Asked, budget: int, acceptance: float | None) -> float:
    """Tokens per second in the middle of an answer."""
    tokens, seeds = (min(asked.answer, _STEADY), (1,)) if acceptance is None else (300, (1, 2))

    def one(seed: int) -> float:
        before = max(1, asked.prompt + (asked.answer - tokens) // 2)
        times = _token_times(machine, before, tokens, budget, acceptance, seed)
        begin = int(_SETTLED * len(times))
        return (len(times) - 1 - begin) / (times[-1] - times[begin])

    return harmonic_mean([one(seed) for seed in seeds])


def prompt(machine: Machine, budget: int, num_tokens: int) -> float:
    """Seconds from a prompt until its first token, with nothing else under way."""
    return _token_times(machine, num_tokens, 1, budget, None, 1)[0]


def many(machine: Machine, asked: Asked, acceptance: float | None) -> float:
    """Tokens per second of ``asked.streams`` streams together, while all decode."""
    window = _STEADY if acceptance is None else _WINDOW
    return sum(rates(machine, (acceptance or 0.0,) * asked.streams, window, flight=OFF if acceptance is None else None))


def live(planner: Planner, aim: Aim, cut: Cut, host: float = 0.0) -> float:
    """What a plan scores a cut by for an aim: turns of a chat per second, or tokens per second of all streams."""
    asked, machine = planner.asked, pipeline_of(planner.profiles, cut, host)
    if aim is Aim.THROUGHPUT:
        return many(machine, asked, asked.acceptance)
    return 1 / turn(machine, asked, asked.budget(planner.profiles), asked.acceptance)


def rates(
    machine: Machine,
    acceptance: Many[float],
    tokens: int = 400,
    *,
    groups: int | None = None,
    flight: Flight | None = None,
) -> list[float]:
    """Tokens per second of each of several streams while all decode, over ``tokens`` of each but for the first quarter.

    ``acceptance``: of each; ``groups``, ``flight``: of all; ``None``: as the live choice has it.
    """
    config = config_of(
        machine,
        num_groups=groups or machine.num_stages,
        token_budget=512,
        max_running=len(acceptance),
        max_len=2**40,
        speculates=flight is None or not flight.is_off,
        fixed_groups=groups is not None,
    )
    right = dict(enumerate(acceptance))
    simulator = Simulator(Scheduler(config), machine, acceptance=right, seed=1, by_place=True)
    for seq_id in right:
        params = SamplingParams(max_tokens=50 * tokens)
        simulator.submit(0.0, Sequence(seq_id, [0] * _PROMPT, params, 0, flight=flight))
    times = [simulator.times[seq_id] for seq_id in right]
    a_while = _STEPS * sum(stage.at(Shape(1)) for stage in machine.stages)
    while min(map(len, times)) < tokens // 4:
        simulator.run(simulator.now + a_while)
    begin = simulator.now
    while min(map(len, times)) < tokens:
        simulator.run(simulator.now + a_while)
    return [sum(begin < at <= simulator.now for at in each) / (simulator.now - begin) for each in times]


def rates_without_drafts(machine: Machine, num_streams: int, tokens: int = 200) -> list[float]:
    """Tokens per second of each of several streams without drafts, in the best number of groups."""
    most = min(machine.num_stages, num_streams)
    found = (rates(machine, (0.0,) * num_streams, tokens, groups=groups, flight=OFF) for groups in range(1, most + 1))
    return max(found, key=sum)


def _token_times(
    machine: Machine, before: int, answer: int, budget: int, acceptance: float | None, seed: int
) -> list[float]:
    """When the tokens of one request come that is alone."""
    speculates, longest = acceptance is not None, before + answer + 1
    config = config_of(machine, token_budget=budget, max_running=1, max_len=longest, speculates=speculates)
    simulator = Simulator(Scheduler(config), machine, acceptance=acceptance or 0.0, seed=seed, by_place=True)
    simulator.submit(0.0, Sequence(0, [0] * before, SamplingParams(max_tokens=answer), 0))
    simulator.run()
    return simulator.times[0]
