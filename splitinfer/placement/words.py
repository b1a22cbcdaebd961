"""Why a cut is the best, and what is lacking, in sentences made from the figures."""

from collections.abc import Callable, Iterator

from splitinfer.core.kv.budget import BLOCK
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid, orders, stride_of
from splitinfer.placement.memory import Memory
from splitinfer.placement.pipeline import unmeasured
from splitinfer.placement.plan import Best, Plan
from splitinfer.placement.screen import Screen

_GB = 1e9
_NOTHING = 1e-6  # seconds
_EVEN = 0.05  # difference of stages that counts as none


def aim_in_words(aim: Aim, asked: Asked) -> str:
    """What an aim asks for."""
    if aim is Aim.CHAT:
        return f"the quickest answer of {asked.answer:,} tokens to a prompt of {asked.prompt:,}, for one reader"
    if aim is Aim.THROUGHPUT:
        return f"the most tokens a second of {asked.streams:,} streams, each with room for {asked.context:,} tokens"
    return "the longest context of one sequence"


def name_in_words(profiles: Profiles, cut: Cut) -> str:
    """A cut with its machines: ``studio 40, mini 26``."""
    return ", ".join(f"{name} {count}" for name, count in zip(_names(profiles, cut), cut.layers, strict=True))


def why(plan: Plan, best: Best) -> list[str]:
    """Why this cut, in a few sentences."""
    of_aim = {Aim.CHAT: _chat, Aim.THROUGHPUT: _throughput, Aim.CONTEXT: _context}
    return [*of_aim[best.aim](plan, best), *_left_out(plan, best), *_bounds(plan, best), *_links(plan, best)]


def _chat(plan: Plan, best: Best) -> Iterator[str]:
    seconds = _seconds(plan, best, 1)
    rest = max(0.0, 1 / best.figures.one - sum(seconds.values()))  # a difference of near-equals
    if len(seconds) == 1:
        beside = f" and {_ms(rest)} for everything else" if rest > _NOTHING else ""
        yield f"A token takes {_times(seconds)}{beside}; no other machine would be faster."
        return
    yield f"A token takes {_times(seconds)}, one stage after the other, and {_ms(rest)} for links and everything else."
    slowest, figures = max(seconds, key=seconds.__getitem__), best.figures
    if figures.one_with_drafts is None:
        yield f"Chunks of a long prompt overlap the stages; {slowest} is the bottleneck."
    elif figures.one_with_drafts > figures.one:
        gain, first = figures.one_with_drafts / figures.one, next(iter(seconds))
        yield f"Drafts overlap the stages for {gain:.2g} times the tokens; {first} is the bottleneck."


def _throughput(plan: Plan, best: Best) -> Iterator[str]:
    seconds = _seconds(plan, best, plan.asked.streams)
    if len(seconds) == 1:
        yield f"A step of all streams takes {_times(seconds)}; a second stage would cost more than it gains."
        return
    yield f"A step of one group of streams takes {_times(seconds)}."
    slowest, fastest = max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)
    idle = 1 - seconds[fastest] / seconds[slowest]
    if idle < _EVEN:
        yield "All stages are busy nearly all the time."
    else:
        yield f"{slowest} is the bottleneck; {fastest} waits {idle:.0%} of the time."


def _context(plan: Plan, best: Best) -> Iterator[str]:
    longest = best.figures.longest
    if longest >= plan.profiles.model.context_length:
        yield f"All {longest:,} tokens that the model was trained for fit; this is the fastest cut where they do."
        return
    lacks = Memory(plan.profiles, plan.asked).lacks(best.cut, longest + BLOCK, 1)
    full = [plan.profiles.machines[m].name for m, lack in lacks.items() if lack > 0]
    verb = "is" if len(full) == 1 else "are"
    yield f"At {longest:,} tokens {' and '.join(full)} {verb} full, and no other cut has room for more."


def _left_out(plan: Plan, best: Best) -> Iterator[str]:
    out = [m.name for i, m in enumerate(plan.profiles.machines) if i not in best.cut.machines]
    if out:
        reason = "the model fits without" if best.aim is Aim.CONTEXT else "it is faster without"
        yield f"{' and '.join(out)} {'gets' if len(out) == 1 else 'get'} no layers: {reason}."


def _bounds(plan: Plan, best: Best) -> Iterator[str]:
    """What memory forces."""
    if best.faster is not None:
        sequences = plan.asked.sequences(best.aim)
        lacks = Memory(plan.profiles, plan.asked).lacks(best.faster, plan.asked.context, sequences)
        lack, machine = max((lack, machine) for machine, lack in lacks.items())
        yield (
            f"{name_in_words(plan.profiles, best.faster)} would be {best.gain - 1:.0%} faster, "
            f"but {plan.profiles.machines[machine].name} has {gigabytes(lack)} too little memory."
        )


def _links(plan: Plan, best: Best) -> Iterator[str]:
    for a, b in unmeasured(plan.profiles, best.cut):
        yield f"The link from {a} to {b} was not measured; the plan assumes the slowest that was."


def shortage(profiles: Profiles, asked: Asked, aim: Aim) -> str:
    """What is lacking where no cut meets an aim, and what would make room."""
    context, sequences = BLOCK if aim is Aim.CONTEXT else asked.context, asked.sequences(aim)
    memory, num_layers = Memory(profiles, asked), profiles.model.num_layers
    every = orders(len(profiles.machines), num_layers, uses_all=asked.uses_all)
    cuts = list(on_grid(every, num_layers, stride_of(every, num_layers)))
    lacks = [memory.lacks(cut, context, sequences) for cut in cuts]
    lacking = min(sum(max(0, lack) for lack in each.values()) for each in lacks)
    first = min(each[0] for each in lacks)
    what = (
        f"a sequence of {context:,} tokens does" if sequences == 1 else f"{sequences} streams of {context:,} tokens do"
    )
    sentences = [f"For {aim}, {what} not fit: {gigabytes(lacking)} too little memory."]
    remedies = ["fewer bits a weight", "one more machine"]
    if first > 0:
        sentences.append(f"The coordinator alone has {gigabytes(first)} too little; start it on another machine.")
        remedies = []
    shorter = BLOCK * _most(lambda n: any(memory.fits(cut, n * BLOCK, sequences) for cut in cuts), -(-context // BLOCK))
    fewer = _most(lambda n: any(memory.fits(cut, context, n) for cut in cuts), sequences)
    remedies += [f"a context of {shorter:,} tokens"] if shorter else []
    remedies += [f"{fewer} stream{'s' * (fewer > 1)}"] if fewer else []
    sentences += [f"It would fit with {', or with '.join(remedies)}."] if remedies else []
    if asked.kv_share < 1:
        sentences.append(f"(KV may take {asked.kv_share:.0%} of what the weights leave free.)")
    return " ".join(sentences)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 below ``most`` that fits; 0 always does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gigabytes(num_bytes: float) -> str:
    """Bytes as GB of 10^9, with three digits."""
    return f"{num_bytes / _GB:.3g} GB"


def _names(profiles: Profiles, cut: Cut) -> list[str]:
    return [profiles.machines[m].name for m in cut.machines]


def _seconds(plan: Plan, best: Best, streams: int) -> dict[str, float]:
    """Each stage's seconds for a step, by the machine's name."""
    seconds = Screen(plan.profiles, plan.asked).seconds(best.cut, streams)
    return dict(zip(_names(plan.profiles, best.cut), seconds, strict=True))


def _times(seconds: dict[str, float]) -> str:
    return ", ".join(f"{_ms(each)} on {name}" for name, each in seconds.items())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
