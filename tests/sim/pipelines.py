"""A cut of measured machines as a machine to simulate, and what the live scheduler gives there, in virtual time.

A simulated token costs some tenths of a millisecond, so no more of them are simulated than figures need: a stretch in
the middle of an answer. Without drafts every step is like the one before it, and few tokens do; with drafts there is
luck, and a choice to be learned.
"""

from statistics import harmonic_mean

from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import OFF
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import costs_of, drafting, hop_ends, hop_of
from tests.emulation.machine import Hop, Machine
from tests.sim import drafts
from tests.sim.simulator import Simulator, config_of

_SETTLED = 0.25  # of an answer: what is not counted of its rate, while the choice of drafts is learned
_WINDOW, _STEADY = 120, 48  # tokens of each of many streams, with drafts; of a rate without


def pipeline_of(profiles: Profiles, cut: Cut, host: float = 0.0, buffers: float = 2.0) -> Machine:
    """A cut as a machine. ``host``: the coordinator's own seconds of a step; ``buffers``: of a step, for a layer."""
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
        buffers=tuple(max(1, round(buffers * count)) for count in cut.layers),
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
    crowd = drafts.Crowd(machine, (acceptance or 0.0,) * asked.streams, window, by_place=True)
    return drafts.rate(crowd, drafts.Choice(flight=OFF) if acceptance is None else drafts.LIVE)


def _token_times(
    machine: Machine, before: int, answer: int, budget: int, acceptance: float | None, seed: int
) -> list[float]:
    """When the tokens of one request come that is alone."""
    speculates, longest = acceptance is not None, before + answer + 1
    config = config_of(machine, token_budget=budget, max_running=1, max_len=longest, speculates=speculates)
    simulator = Simulator(Scheduler(config), machine, acceptance=acceptance or 0.0, seed=seed, by_place=True)
    simulator.submit(0.0, Sequence(0, [0] * before, SamplingParams(max_tokens=answer), 0))
    simulator.run()
    return simulator.served[0].token_times
