"""This machine alone beside the best cut over several machines: four rows, a column for each way to run the model, and
what the other machines change in one sentence. Where there is only one machine, another one like it is assumed, with
half of the weights, over a link of 1 ms and 100 MB/s."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import Layout
from splitinfer.core.plain_text import rate, seconds, size
from splitinfer.machine.profile import ModelProfile, Profiles
from splitinfer.placement.asked import LONG_PROMPT, Aim, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import layout_of, name_in_words, text_of, why
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.memory import Memory
from splitinfer.placement.plan import Best, Plan, Ways

_SECOND = "(second)"  # a name that no stage can have
_EACH = 4096  # tokens of each chat, where there are several at once
_SAME = 1.05  # times as fast: what is less is no difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """``headings``: of the ways to run the model. ``rows``: each a name, and a cell for each way; a cell that cannot be
    had says why. ``sentence``: what further machines change."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentence: str

    def lines(self) -> Iterator[str]:
        """The same in a line for each way."""
        for at, heading in enumerate(self.headings, 1):
            yield f"{heading}: {'; '.join(f'{row[0]}: {row[at]}' for row in self.rows)}"


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run the model: tokens per second of one chat and of several together, and seconds to the first token of
    a long prompt; ``None`` where that does not fit, for the reason that its cell says."""

    heading: str
    cells: tuple[str, str, str, str]
    one: float | None
    many: float | None
    prompt: float | None


def beside(plan: Plan, aim: Aim) -> Comparison:
    """The ways of a plan to run its model, each at its best for ``aim``; drafts are beside the way that is best."""
    profiles, ways = plan.profiles, plan.ways.get(aim, Ways())
    cuts = [Cut((0,), (profiles.model.num_layers,))]
    cuts += [best.cut for best in (ways.pipeline, ways.tensor_parallel) if best is not None]
    if len(profiles.machines) == 1 and profiles.model.num_layers > 1:
        first = profiles.machines[0]
        second = replace(first, name=_SECOND, address=f"tcp://{_SECOND}")
        profiles = replace(profiles, machines=(first, second), links=())
        cuts.append(halved(profiles.model))
    shown = [_way(profiles, replace(plan.asked, acceptance=None), cut) for cut in cuts]
    sentences = list(_differences(profiles, cuts, shown))
    if plan.asked.acceptance is not None:
        best = plan.best.get(aim)
        at = cuts.index(best.cut) if best is not None and best.cut in cuts else len(cuts) - 1
        drafted, plain = _way(profiles, plan.asked, cuts[at]), shown[at]
        shown.insert(at + 1, replace(drafted, heading=f"with drafts, {plan.asked.acceptance:.0%} right"))
        if drafted.one and plain.one:
            sentences.append(f"Drafts make one chat {_times(drafted.one / plain.one)}.")
    long, streams = _long(profiles.model), plan.asked.streams
    names = ("fits", "one chat", f"{streams:,} at once", f"a prompt of {long:,} tokens")
    rows = tuple((name, *cells) for name, *cells in zip(names, *(way.cells for way in shown), strict=True))
    return Comparison(tuple(way.heading for way in shown), rows, " ".join(sentences))


def layout_text(plan: Plan, best: Best, origin: str, base: Layout | None = None) -> str:
    """The layout file of a cut: its aim, figures, reasons and ``origin`` as comments."""
    about = [f"Planned for {best.aim}.", *beside(plan, best.aim).lines(), *why(plan, best), origin]
    return text_of(layout_of(plan, best, base), about)


def halved(model: ModelProfile) -> Cut:
    """The cut over two machines whose larger stage is smallest."""
    count = model.num_layers

    def larger(first: int) -> int:
        return max(model.weights(0, first), model.weights(first, count))

    first = min(range(1, count), key=larger)
    return Cut((0, 1), (first, count - first))


def held_in_words(model: ModelProfile) -> str:
    """What a second machine would change for the memory of this one."""
    if model.num_layers < 2:
        return ""
    half, whole = (size(model.weights(0, end)) for end in (halved(model).layers[0], model.num_layers))
    return f"With a second machine, this one would hold {half} of {whole}."


# -- a way -----------------------------------------------------------------------------------------


def _way(profiles: Profiles, asked: Asked, cut: Cut) -> _Way:
    formulas, a, each = Formulas(profiles, asked), asked.acceptance, min(_EACH, asked.context)
    long, longest = _long(profiles.model), Memory(profiles, asked).longest(cut)
    needs = [_needs(profiles, asked, cut, *what) for what in ((BLOCK, 1), (each, asked.streams), (long, 1))]
    one = None if needs[0] else formulas.one(cut, a)
    many = None if needs[1] else formulas.many(cut, a)
    prompt = None if needs[2] else formulas.prompt(cut, long)
    chats = f"{asked.streams:,} chats of {each:,} tokens"
    cells = (
        f"no: it needs {needs[0]}" if needs[0] else f"yes, up to {longest:,} tokens",
        "does not fit" if one is None else f"{rate(one)} tokens/s",
        f"does not fit: {chats} need {needs[1]}" if many is None else f"{rate(many)} tokens/s in total",
        f"does not fit: it needs {needs[2]}" if prompt is None else seconds(prompt),
    )
    return _Way(_heading(profiles, cut), cells, one, many, prompt)


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
    """What so many sequences need on the machine that lacks most; empty if they fit."""
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
        yield f"It {'does not fit' if alone.one is None else 'fits'} on {here}."
    for cut, way in zip(cuts[1:], ways[1:], strict=True):
        names = [name for m in cut.machines for name in profiles.machines[m].ranks if name != here]
        others = " and ".join(names).replace(_SECOND, "a second machine like this one")
        how = ", tensor parallel" if any(profiles.machines[m].across for m in cut.machines) else ""
        yield f"With {others}{how}: {_difference(here, alone, way)}."


def _difference(here: str, alone: _Way, way: _Way) -> str:
    if way.one is None:
        return "it does not fit"
    if alone.one is None:
        return f"it fits, as it does not on {here} alone"
    said = [f"one chat {_times(way.one / alone.one)}"]
    if way.many is not None:
        said.append(f"several at once {_times(way.many / alone.many) if alone.many else 'fit'}")
    if way.prompt is not None:
        said.append(f"a long prompt {_times(alone.prompt / way.prompt) if alone.prompt else 'fits'}")
    return ", ".join(said)


def _times(gain: float) -> str:
    """
    >>> _times(1.72), _times(0.98), _times(0.042)
    ('1.7 times as fast', 'no faster', '24 times as slow')
    """
    if 1 / _SAME < gain < _SAME:
        return "no faster"
    return f"{rate(gain)} times as fast" if gain > 1 else f"{rate(1 / gain)} times as slow"
