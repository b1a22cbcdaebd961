"""Why a cut is the best, and what is lacking, in sentences made from the figures."""

from collections.abc import Iterator

from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.pipeline import unmeasured
from splitinfer.placement.plan import Best, Plan
from splitinfer.placement.remedies import Shortage
from splitinfer.placement.screen import Screen

_GB = 1e9
_EVEN = 0.05  # difference of stages that counts as none


def aim_in_words(aim: Aim, asked: Asked) -> str:
    """What an aim asks for."""
    if aim is Aim.CHAT:
        return f"the quickest answer of {asked.answer:,} tokens to a prompt of {asked.prompt:,}, for one reader"
    if aim is Aim.THROUGHPUT:
        return f"the most tokens a second of {asked.streams:,} streams, each with room for {asked.context:,} tokens"
    return "the longest context of one sequence"


def name_in_words(plan: Plan, cut: Cut) -> str:
    """A cut with its machines: ``studio 40, mini 26``."""
    machines = plan.profiles.machines
    return ", ".join(f"{machines[m].name} {count}" for m, count in zip(cut.machines, cut.layers, strict=True))


def why(plan: Plan, best: Best) -> list[str]:
    """Why this cut, in a few sentences."""
    screen = Screen(plan.profiles, plan.asked)
    of_aim = {Aim.CHAT: _chat, Aim.THROUGHPUT: _throughput, Aim.CONTEXT: _context}
    return [*of_aim[best.aim](plan, best, screen), *_left_out(plan, best), *_bounds(plan, best), *_links(plan, best)]


def _chat(plan: Plan, best: Best, screen: Screen) -> Iterator[str]:
    seconds, names = screen.single(best.cut), _names(plan, best.cut)
    times = ", ".join(f"{_ms(each)} on {name}" for each, name in zip(seconds, names, strict=True))
    beside = 1 / best.figures.one - sum(seconds)
    if len(seconds) == 1:
        yield f"A token takes {times} and {_ms(beside)} beside computing; no other machine would make it quicker."
        return
    yield f"A token takes {times}, and {_ms(beside)} on links and beside computing: one stage after the other."
    if best.figures.one_with_drafts is None:
        yield f"A long prompt takes both in turn, a chunk at a time, and {names[_slowest(seconds)]} sets its pace."
    elif best.figures.one_with_drafts > best.figures.one:
        gain = best.figures.one_with_drafts / best.figures.one
        yield f"Drafts keep the stages busy at once, for {gain:.2g} times the tokens, and stand in line on {names[0]}."


def _throughput(plan: Plan, best: Best, screen: Screen) -> Iterator[str]:
    seconds, names = screen.bottleneck(best.cut), _names(plan, best.cut)
    times = ", ".join(f"{_ms(each)} on {name}" for each, name in zip(seconds, names, strict=True))
    if len(seconds) == 1:
        yield f"A step of all streams takes {times}; a second stage would cost more than it gains."
        return
    slowest = _slowest(seconds)
    idle = 1 - min(seconds) / seconds[slowest]
    yield f"A group's step takes {times}."
    if idle < _EVEN:
        yield "All stages are busy nearly all the time."
    else:
        idlest = names[min(range(len(seconds)), key=seconds.__getitem__)]
        yield f"{names[slowest]} is the bottleneck; {idlest} waits {idle:.0%} of the time."


def _context(plan: Plan, best: Best, screen: Screen) -> Iterator[str]:
    memory, names = plan.memory, _names(plan, best.cut)
    longest = best.figures.longest
    if longest >= plan.profiles.model.context_length:
        yield f"All {longest:,} tokens that the model was trained for fit; of such cuts it is the quickest."
        return
    lacks = memory.lacks(best.cut, longest + 256, 1)
    full = [name for name, lack in zip(names, lacks, strict=True) if lack > 0]
    verb = "is" if len(full) == 1 else "are"
    yield f"At {longest:,} tokens {' and '.join(full)} {verb} full, and no other cut has room for more."


def _left_out(plan: Plan, best: Best) -> Iterator[str]:
    out = [m.name for i, m in enumerate(plan.profiles.machines) if i not in best.cut.machines]
    if out:
        reason = "it fits without" if best.aim is Aim.CONTEXT else "it is quicker without"
        yield f"{' and '.join(out)} {'gets' if len(out) == 1 else 'get'} no layers: {reason}."


def _bounds(plan: Plan, best: Best) -> Iterator[str]:
    """What memory forces."""
    if best.faster is None:
        return
    lacks = plan.memory.lacks(best.faster, plan.asked.context, plan.asked.sequences(best.aim))
    lack, name = max(zip(lacks, _names(plan, best.faster), strict=True))
    yield (
        f"Memory forces it: {name_in_words(plan, best.faster)} would be {best.gain - 1:.0%} faster, "
        f"but {name} has {gigabytes(lack)} too little."
    )


def _links(plan: Plan, best: Best) -> Iterator[str]:
    for a, b in unmeasured(plan.profiles, best.cut):
        yield f"The link from {a} to {b} was not measured; it is taken to be like the slowest that was."


def shortage_in_words(shortage: Shortage, asked: Asked) -> list[str]:
    """What does not fit, by how much, and what would be enough."""
    what = _sequences(shortage.sequences, shortage.context_asked)
    lines = [f"For {shortage.aim}, {what} {'do' if shortage.sequences > 1 else 'does'} not fit: "
             f"{gigabytes(shortage.lacking)} too little."]  # fmt: skip
    if shortage.first:
        lines.append(f"The coordinator has {gigabytes(shortage.first)} too little for one layer; start it elsewhere.")
    remedies = list(_remedies(shortage))
    lines += [f"It would fit with {' or with '.join(remedies)}."] if remedies else []
    if asked.kv_share < 1:
        lines.append(f"(KV may take {asked.kv_share:.0%} of what the weights leave free.)")
    return lines


def _remedies(shortage: Shortage) -> Iterator[str]:
    if shortage.weights is not None:
        yield f"weights of {shortage.weights:.0%} of their size (fewer bits)"
    if shortage.machine is not None:
        yield f"one more machine with {gigabytes(shortage.machine)} free"
    if shortage.context is not None:
        yield f"a context of {shortage.context:,} tokens"
    if shortage.streams is not None:
        yield "one stream" if shortage.streams == 1 else f"{shortage.streams} streams"


def _sequences(count: int, context: int) -> str:
    return f"a sequence of {context:,} tokens" if count == 1 else f"{count:,} streams of {context:,} tokens"


def gigabytes(num_bytes: float) -> str:
    """Bytes as GB of 10^9, with three digits."""
    return f"{num_bytes / _GB:.3g} GB"


def _names(plan: Plan, cut: Cut) -> list[str]:
    return [plan.profiles.machines[m].name for m in cut.machines]


def _slowest(seconds: list[float]) -> int:
    return max(range(len(seconds)), key=seconds.__getitem__)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
