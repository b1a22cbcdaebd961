"""The figures of a cut by the live scheduler in virtual time, with the live choice of groups and drafts.

A simulated token costs some tenths of a millisecond, so no more of them are simulated than figures need: a stretch in
the middle of an answer, whose rate is that of the whole answer. Without drafts every step is like the one before it,
and few tokens do; with drafts there is luck, and a choice to be learned, which may settle by what is learned first.
"""

from dataclasses import dataclass
from statistics import harmonic_mean

from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import OFF
from splitinfer.machine.machine import Machine
from splitinfer.placement.asked import LONG_PROMPT, Asked
from splitinfer.sim import drafts
from splitinfer.sim.simulator import Simulator, config_of

_SETTLED = 0.25  # of an answer: what is not counted of its rate, while the choice of drafts is learned
_WINDOW = 120  # tokens of each of many streams
_STEADY = 48  # tokens from which a rate without drafts is taken
# Tokens from which a rate with drafts is taken, and the texts, by the seeds of the places where drafts are right.
_FULL, _ROUGH = (300, (1, 2, 3)), (120, (1,))
_SEED = 1  # where chance plays no part


@dataclass(frozen=True, slots=True)
class Turn:
    """One stream. ``seconds``: from the prompt to the last token of the answer; ``rate``: tokens per second of the
    answer, once its drafts are chosen."""

    seconds: float
    rate: float


def turn(machine: Machine, asked: Asked, budget: int, acceptance: float | None, *, is_rough: bool = False) -> Turn:
    """A prompt and its answer, alone. With drafts the answer's seconds are those at its usual rate: the first requests
    pay for trying numbers of drafts, later ones do not. ``is_rough``: of few tokens, which tell cuts apart that differ
    by more than some percent."""
    steady = min(asked.answer, _STEADY), (_SEED,)
    tokens, seeds = steady if acceptance is None else _ROUGH if is_rough else _FULL
    rate = harmonic_mean([_rate(machine, asked, tokens, budget, acceptance, seed) for seed in seeds])
    return Turn(long_prompt(machine, budget, asked.prompt) + (asked.answer - 1) / rate, rate)


def _rate(machine: Machine, asked: Asked, answer: int, budget: int, acceptance: float | None, seed: int) -> float:
    """Tokens per second of ``answer`` tokens in the middle of an answer."""
    prompt = max(1, asked.prompt + (asked.answer - answer) // 2)
    times = _token_times(machine, prompt, answer, budget, acceptance, seed)
    begin = int(_SETTLED * len(times))
    return (len(times) - 1 - begin) / (times[-1] - times[begin])


def long_prompt(machine: Machine, budget: int, num_tokens: int = LONG_PROMPT) -> float:
    """Seconds from a long prompt until its first token, with nothing else under way."""
    return _token_times(machine, num_tokens, 1, budget, None, _SEED)[0]


def many(machine: Machine, asked: Asked, acceptance: float | None) -> float:
    """Tokens per second of ``asked.streams`` streams together, while all decode."""
    window = _STEADY if acceptance is None else _WINDOW
    crowd = drafts.Crowd(machine, (acceptance or 0.0,) * asked.streams, window, by_place=True)
    return drafts.run(crowd, drafts.Choice(flight=OFF) if acceptance is None else drafts.LIVE).rate


def _token_times(
    machine: Machine, prompt: int, answer: int, budget: int, acceptance: float | None, seed: int
) -> list[float]:
    """When the tokens of one request come that is alone."""
    speculates, longest = acceptance is not None, prompt + answer + 1
    config = config_of(machine, token_budget=budget, max_running=1, max_len=longest, speculates=speculates)
    simulator = Simulator(Scheduler(config), machine, acceptance=acceptance or 0.0, seed=seed, by_place=True)
    simulator.submit(0.0, Sequence(0, [0] * prompt, SamplingParams(max_tokens=answer), 0))
    simulator.run()
    return simulator.served[0].token_times
