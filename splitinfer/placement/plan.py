"""The best cut for each aim, of all that fit, by formulas. Where figures are as good as equal, fewer machines are
better: one more that can fail is to be worth something."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from splitinfer.errors import CannotFit
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import LONG_PROMPT, Aim, Asked
from splitinfer.placement.cuts import Cut, near, on_grid, orders, stride_of
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.memory import Memory

_WORTH = 0.99  # of the best figure, that fewer machines may have
_AS_LONG = 0.99  # of the longest context
_WIDER = 16  # cuts of a grid that are looked around, the best


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cut does: tokens per second of one stream and of all streams together, without and with drafts (``None``:
    there are none), seconds from a prompt of 4,096 tokens to its first token, seconds of a turn, and the longest
    context of one sequence."""

    one: float
    many: float
    ttft: float
    turn: float
    longest: int
    one_with_drafts: float | None = None
    many_with_drafts: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best cut for an aim. ``faster``: the best one were there memory enough, if it does not fit; ``gain``: how
    many times as good it would be."""

    aim: Aim
    cut: Cut
    figures: Figures
    faster: Cut | None = None
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``best``: by aim; an aim is missing where nothing fits that meets it. ``tried``: how many cuts were. ``ways``: by
    aim, the cut of the first machine alone, and the best of those over several machines, whether it fits or not."""

    profiles: Profiles
    asked: Asked
    best: Mapping[Aim, Best]
    tried: int
    ways: Mapping[Aim, tuple[Cut, ...]]


class Planner:
    """Finds the best of ``cuts``, or of all cuts, and remembers what it has computed of each."""

    def __init__(self, profiles: Profiles, asked: Asked, cuts: Sequence[Cut] | None = None) -> None:
        self.profiles, self.asked = profiles, asked
        self.memory, self.formulas = Memory(profiles, asked), Formulas(profiles, asked)
        self.score = cache(self._score)
        self.cuts = self._every_cut() if cuts is None else list(cuts)

    def plan(self, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
        """The best cut for each aim."""
        best = {aim: found for aim in aims if (found := self.best(aim)) is not None}
        return Plan(self.profiles, self.asked, best, len(self.cuts), {aim: self._ways(aim) for aim in aims})

    def _ways(self, aim: Aim) -> tuple[Cut, ...]:
        alone, several = Cut((0,), (self.profiles.model.num_layers,)), [cut for cut in self.cuts if len(cut.layers) > 1]
        best = self._ranked(aim, several)[:1] or sorted(several, key=lambda cut: -self.score(aim, cut))[:1]
        return (alone, *best)

    def _every_cut(self) -> list[Cut]:
        """Every cut and order, or where there are too many those on a grid and those near the best of them."""
        num_layers = self.profiles.model.num_layers
        every = orders(len(self.profiles.machines), num_layers, uses_all=self.asked.uses_all)
        stride = stride_of(every, num_layers)
        found = dict.fromkeys(on_grid(every, num_layers, stride))
        for aim in Aim if stride > 1 else ():
            best, distance = self._ranked(aim, found)[:_WIDER], stride
            while distance > 1:
                distance = -(-distance // 2)
                around = near(best, distance)
                found.update(dict.fromkeys(around))
                best = self._ranked(aim, around)[:_WIDER]
        return list(found)

    def best(self, aim: Aim) -> Best | None:
        """The best cut for an aim; ``None`` if none fits."""
        ranked = self._ranked(aim, self.cuts)
        if not ranked:
            return None
        enough = _WORTH * self.score(aim, ranked[0])
        cut = min((cut for cut in ranked if self.score(aim, cut) >= enough), key=lambda cut: len(cut.machines))
        free = max(self.cuts, key=lambda each: self.score(aim, each))
        if aim is Aim.CONTEXT or self.memory.fits(free, self.asked.context, self.asked.sequences(aim)):
            return Best(aim, cut, self.figures(cut))
        return Best(aim, cut, self.figures(cut), free, self.score(aim, free) / self.score(aim, cut))

    def _ranked(self, aim: Aim, cuts: Iterable[Cut]) -> list[Cut]:
        """The cuts that meet an aim's need of memory, the best first; for the context those with the longest one."""
        if aim is not Aim.CONTEXT:
            sequences = self.asked.sequences(aim)
            fitting = [cut for cut in cuts if self.memory.fits(cut, self.asked.context, sequences)]
        else:
            lengths, most = dict[Cut, int](), 1
            for cut in cuts:
                if self.memory.fits(cut, ceil(_AS_LONG * most), 1):
                    lengths[cut] = self.memory.longest(cut)
                    most = max(most, lengths[cut])
            fitting = [cut for cut, length in lengths.items() if 0 < length >= _AS_LONG * most]
        return sorted(fitting, key=lambda cut: self.score(aim, cut), reverse=True)

    def _score(self, aim: Aim, cut: Cut) -> float:
        """What is to be as large as possible: turns of a chat per second, or tokens per second of all streams. For the
        context, the turns."""
        if aim is Aim.THROUGHPUT:
            return self.formulas.many(cut, self.asked.acceptance)
        return 1 / self.formulas.turn(cut)

    def figures(self, cut: Cut) -> Figures:
        formulas, a = self.formulas, self.asked.acceptance
        return Figures(
            one=formulas.one(cut, None),
            many=formulas.many(cut, None),
            ttft=formulas.prompt(cut, LONG_PROMPT),
            turn=formulas.turn(cut),
            longest=self.memory.longest(cut),
            one_with_drafts=None if a is None else formulas.one(cut, a),
            many_with_drafts=None if a is None else formulas.many(cut, a),
        )


def plan(profiles: Profiles, asked: Asked, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
    """The best cut for each aim.

    Raises:
        CannotFit: every machine is to have layers, and there are too few.
    """
    num_machines, num_layers = len(profiles.machines), profiles.model.num_layers
    if asked.uses_all and num_machines > num_layers:
        raise CannotFit(f"{num_machines} machines cannot share {num_layers} layers with one for each")
    return Planner(profiles, asked).plan(aims)
