"""The figures of a cut by the live scheduler in virtual time, with the live choice of groups and drafts."""

from dataclasses import dataclass
from statistics import harmonic_mean, mean

from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import OFF
from splitinfer.machine.machine import Machine
from splitinfer.placement.asked import LONG_PROMPT, Asked
from splitinfer.sim import drafts
from splitinfer.sim.simulator import Served, Simulator

_SETTLED = 0.25  # of an answer: what is not counted of its rate, while the choice of drafts is learned
_WINDOW = 120  # tokens of each of many streams
_LEAST_ANSWER = 300  # tokens from which a rate with drafts is taken
_SEEDS = (1, 2, 3)  # of the places where drafts are right: what is learned first may settle the choice of drafts


@dataclass(frozen=True, slots=True)
class Turn:
    """One stream. ``seconds``: from the prompt to the last token of the answer; ``ttft``: to the first one; ``rate``:
    tokens per second of the answer, once its drafts are chosen."""

    seconds: float
    ttft: float
    rate: float


def turn(machine: Machine, asked: Asked, budget: int, acceptance: float | None) -> Turn:
    """A prompt and its answer, alone. With drafts the answer's seconds are those at its usual rate: the first requests
    pay for trying numbers of drafts, later ones do not."""
    if acceptance is None:
        return _turn(machine, asked, asked.answer, budget, None, _SEEDS[0])
    answer = max(asked.answer, _LEAST_ANSWER)
    turns = [_turn(machine, asked, answer, budget, acceptance, seed) for seed in _SEEDS]
    rate = harmonic_mean(one.rate for one in turns)
    return Turn(mean(one.seconds for one in turns), mean(one.ttft for one in turns), rate)


def _turn(machine: Machine, asked: Asked, answer: int, budget: int, acceptance: float | None, seed: int) -> Turn:
    times = _serve(machine, asked.prompt, answer, budget, acceptance, seed).token_times
    begin = int(_SETTLED * len(times))
    rate = (len(times) - 1 - begin) / (times[-1] - times[begin])
    return Turn(times[0] + (asked.answer - 1) / rate, times[0], rate)


def long_prompt(machine: Machine, budget: int, num_tokens: int = LONG_PROMPT) -> float:
    """Seconds from a long prompt until its first token, with nothing else under way."""
    return _serve(machine, num_tokens, 1, budget, None, _SEEDS[0]).token_times[0]


def many(machine: Machine, asked: Asked, acceptance: float | None) -> float:
    """Tokens per second of ``asked.streams`` streams together, while all decode."""
    crowd = drafts.Crowd(machine, (acceptance or 0.0,) * asked.streams, _WINDOW, seed=_SEEDS[0], by_place=True)
    return drafts.run(crowd, drafts.Choice(flight=OFF) if acceptance is None else drafts.LIVE).rate


def _serve(machine: Machine, prompt: int, answer: int, budget: int, acceptance: float | None, seed: int) -> Served:
    """Simulate one request."""
    config = SchedulerConfig(
        num_groups=machine.num_stages,
        max_in_flight=machine.num_stages + 1,
        token_budget=budget,
        max_running=1,
        max_len=prompt + answer + 1,
        blocks=PrefixCacheConfig(keeps_blocks=False),
        speculates=acceptance is not None,
    )
    simulator = Simulator(Scheduler(config), machine, acceptance=acceptance or 0.0, seed=seed, by_place=True)
    simulator.submit(0.0, Sequence(0, [0] * prompt, SamplingParams(max_tokens=answer), 0))
    simulator.run()
    return simulator.served[0]
