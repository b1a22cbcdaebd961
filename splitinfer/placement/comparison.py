"""Compares this machine alone with the cut in force and the best cut over several machines: five rows, a column for
each way to run the model, and one sentence about the gain from other machines. A figure has its range, and is left out
if it is unknown or impossible (``placement.bounds``). With only one machine, a second one like it is assumed, with half
of the weights, over a link of 1 ms and 100 MB/s."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from splitinfer.common.plain_text import rate, seconds, size
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import Layout
from splitinfer.machine.profile import ModelProfile, Profiles
from splitinfer.placement.asked import LONG_PROMPT, Aim, Asked
from splitinfer.placement.bounds import ages, doubts, spread_of, unknown
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import layout_of, name_in_words, text_of, why
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.memory import Memory
from splitinfer.placement.plan import Best, Plan, Ways

_SECOND = "(second)"  # a name that no stage can have
_EACH = 4096  # tokens of each of several chats at once
_SAME = 1.05  # times as fast; a smaller factor is no difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table. ``headings``: the ways to run the model. ``rows``: each a name and a cell for each way; a cell without a
    figure says why. ``sentence``: the gain from further machines."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentence: str

    def lines(self) -> Iterator[str]:
        """Yield a line for each way, with all of its cells."""
        for at, heading in enumerate(self.headings, 1):
            yield f"{heading}: {'; '.join(f'{row[0]}: {row[at]}' for row in self.rows)}"


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run the model: tokens per second of one chat and of several together, and seconds to the first token of
    a long prompt. A figure is None if it does not fit or is unknown; its cell says why."""

    heading: str
    cells: tuple[str, ...]
    fits: bool
    one: float | None
    many: float | None
    prompt: float | None


def beside(plan: Plan, aim: Aim, now: Cut | None = None) -> Comparison:
    """Compare a plan's ways to run its model, each with its best cut for ``aim``. ``now``: the cut in force, which gets
    a column. The best way has a second column with drafts."""
    profiles, ways = plan.profiles, plan.ways.get(aim, Ways())
    alone = Cut((0,), (profiles.model.num_layers,))
    best = [found.cut for found in (ways.pipeline, ways.tensor_parallel) if found is not None]
    cuts = list(dict.fromkeys([alone, *([] if now is None else [now]), *best]))
    if len(profiles.machines) == 1 and profiles.model.num_layers > 1:
        first = profiles.machines[0]
        second = replace(first, name=_SECOND, address=f"tcp://{_SECOND}")
        profiles = replace(profiles, machines=(first, second), links=())
        cuts.append(halved(profiles.model))
    shown = [_way(profiles, replace(plan.asked, acceptance=None), cut) for cut in cuts]
    sentences = [*doubts(plan.profiles), *_differences(profiles, cuts, shown)]
    if now is not None and now != alone:
        at = cuts.index(now)
        shown[at] = replace(shown[at], heading=f"now: {shown[at].heading}")
    if plan.asked.acceptance is not None:
        chosen = plan.best.get(aim)
        at = cuts.index(chosen.cut) if chosen is not None and chosen.cut in cuts else len(cuts) - 1
        drafted, plain = _way(profiles, plan.asked, cuts[at]), shown[at]
        shown.insert(at + 1, replace(drafted, heading=f"with drafts, {plan.asked.acceptance:.0%} right"))
        if drafted.one and plain.one:
            sentences.append(f"Drafts make one chat {_times(drafted.one / plain.one)}.")
    sentences.append(heads_in_words(profiles.model))
    asked, long = plan.asked, _long(profiles.model)
    turn = f"chat: {asked.prompt:,} + {asked.answer:,} tokens"
    names = ("fits", "one chat", turn, f"{asked.streams:,} at once", f"a prompt of {long:,} tokens")
    rows = tuple((name, *cells) for name, *cells in zip(names, *(way.cells for way in shown), strict=True))
    sentences += [ages(profiles)] * bool(ages(profiles))
    return Comparison(tuple(way.heading for way in shown), rows, " ".join(filter(None, sentences)))


def layout_text(plan: Plan, best: Best, origin: str, base: Layout | None = None) -> str:
    """Return the layout file of a cut: its aim, figures, reasons and ``origin`` as comments."""
    about = [f"Planned for {best.aim}.", *beside(plan, best.aim).lines(), *why(plan, best), origin]
    return text_of(layout_of(plan, best, base), about)


def halved(model: ModelProfile) -> Cut:
    """Return the cut over two machines with the smallest larger stage."""
    count = model.num_layers

    def larger(first: int) -> int:
        return max(model.weights(0, first), model.weights(first, count))

    first = min(range(1, count), key=larger)
    return Cut((0, 1), (first, count - first))


def held_in_words(model: ModelProfile) -> str:
    """Return a sentence about the memory that this machine would need with a second one."""
    if model.num_layers < 2:
        return heads_in_words(model)
    half, whole = (size(model.weights(0, end)) for end in (halved(model).layers[0], model.num_layers))
    return f"With a second machine, this one would hold {half} of {whole}. {heads_in_words(model)}".rstrip()


def heads_in_words(model: ModelProfile) -> str:
    """Return a sentence about the prediction heads of a model that runs without a drafter, or an empty string."""
    if not model.has_heads or model.draft is not None:
        return ""
    return (
        "The checkpoint has prediction heads: --draft mtp drafts with them, and with such heads others saw one chat "
        "1.1 to 2.2 times as fast."
    )


# -- a way -----------------------------------------------------------------------------------------


def _way(profiles: Profiles, asked: Asked, cut: Cut) -> _Way:
    formulas, a, each = Formulas(profiles, asked), asked.acceptance, min(_EACH, asked.context)
    long, machines, missing = _long(profiles.model), formulas.machines_of(cut), unknown(formulas, cut, asked)
    sizes = (BLOCK, 1), (each, asked.streams), (long, 1)
    once, several, whole = (_needs(profiles, asked, cut, *what) for what in sizes)
    few, read = spread_of(machines), spread_of(machines, reads=True)

    def cell(
        name: str, value: float, needs: str, show: Callable[[float], str], unit: str = "", lacks: str = ""
    ) -> tuple[str, float | None]:
        if needs:
            return f"does not fit{lacks}", None
        if missing[name]:
            return f"not known: {missing[name]}", None
        spread = few if unit else max(few, read)
        low, high = show(value / spread), show(value * spread)
        return show(value) + unit + (f" ({low} to {high})" if low != high else ""), value

    chats = f": {asked.streams:,} chats of {each:,} tokens need {several}"
    cells = (
        cell("one", formulas.one(cut, a), once, rate, " tokens/s"),
        cell("turn", formulas.turn(cut), once, seconds),
        cell("many", formulas.many(cut, a), several, rate, " tokens/s in total", chats),
        cell("ttft", formulas.prompt(cut, long), whole, seconds, lacks=f": it needs {whole}"),
    )
    fits = f"no: it needs {once}" if once else _fits(Memory(profiles, asked), cut)
    (_, one), _, (_, many), (_, prompt) = cells
    return _Way(_heading(profiles, cut), (fits, *(text for text, _ in cells)), not once, one, many, prompt)


def _fits(memory: Memory, cut: Cut) -> str:
    share = min(memory.in_memory(cut))
    most = f"up to {memory.longest(cut):,} tokens"
    return f"yes, {most}" if share == 1 else f"yes, with {share:.0%} of the experts in memory, {most}"


def _long(model: ModelProfile) -> int:
    return min(LONG_PROMPT, model.context_length)


def _heading(profiles: Profiles, cut: Cut) -> str:
    machines = [profiles.machines[m] for m in cut.machines]
    if machines[-1].name == _SECOND:
        return "with a second one like it"
    if any(each.across for each in machines):
        return f"tensor parallel: {name_in_words(profiles, cut)}"
    return f"{machines[0].name} alone" if len(machines) == 1 else name_in_words(profiles, cut)


def _needs(profiles: Profiles, asked: Asked, cut: Cut, context: int, sequences: int) -> str:
    """Return the need of these sequences on the machine that lacks most, in words; empty if they fit."""
    lack, place = max((lack, place) for place, lack in Memory(profiles, asked).lacks(cut, context, sequences).items())
    if lack <= 0:
        return ""
    machine = profiles.machines[place]
    free = max(0, machine.free_bytes - asked.spare_bytes)
    where = f" on {machine.name}" if len(cut.machines) > 1 and machine.name != _SECOND else ""
    return f"{size(free + lack)}{where}, {size(free)} free"


# -- one sentence ----------------------------------------------------------------------------------


def _differences(profiles: Profiles, cuts: list[Cut], ways: list[_Way]) -> Iterator[str]:
    here, alone = profiles.machines[0].name, ways[0]
    if len(ways) == 1:
        yield f"It {'fits' if alone.fits else 'does not fit'} on {here}."
    for cut, way in zip(cuts[1:], ways[1:], strict=True):
        names = [name for m in cut.machines for name in profiles.machines[m].ranks if name != here]
        others = " and ".join(names).replace(_SECOND, "a second machine like this one")
        how = ", tensor parallel" if any(profiles.machines[m].across for m in cut.machines) else ""
        if said := _difference(here, alone, way):
            yield f"With {others}{how}: {said}."


def _difference(here: str, alone: _Way, way: _Way) -> str:
    """Return the gain of a way over this machine alone, in words; empty if figures of either are unknown."""
    if not way.fits:
        return "it does not fit"
    if not alone.fits:
        return f"it fits, and does not on {here} alone"
    said = [f"one chat {_times(way.one / alone.one)}"] if way.one and alone.one else []
    if way.many:
        said += [f"several at once {_times(way.many / alone.many) if alone.many else 'fit'}"]
    if way.prompt:
        said += [f"a long prompt {_times(alone.prompt / way.prompt) if alone.prompt else 'fits'}"]
    return ", ".join(said)


def _times(gain: float) -> str:
    """Return a gain in words.

    >>> _times(1.72), _times(0.98), _times(0.042)
    ('1.7 times as fast', 'no faster', '24 times as slow')
    """
    if 1 / _SAME < gain < _SAME:
        return "no faster"
    return f"{rate(gain)} times as fast" if gain > 1 else f"{rate(1 / gain)} times as slow"
