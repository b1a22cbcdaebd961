"""The best cut for each aim, with all its figures.

Every cut and order is tried by formula, and the simulator judges the best few of those that fit: turns with drafts,
which take it longest and of which the formula is a mere bound, roughly first, and the best of these in full. Formulas
leave out what the scheduler does between steps, the simulator has the luck of its drafts: where simulated figures are
as good as equal, the formula decides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from splitinfer.errors import CannotFit
from splitinfer.machine.profile import Profiles
from splitinfer.placement import simulate
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, near, on_grid, orders, stride_of
from splitinfer.placement.memory import Memory
from splitinfer.placement.pipeline import pipeline_of
from splitinfer.placement.screen import Screen

_EQUAL = 0.995  # of the best simulated figure
_WORTH = 0.99  # of it, that fewer machines may have: one more that can fail is to be worth something
_AS_LONG = 0.99  # of the longest context
_FINALISTS = 4  # cuts whose rough turns are the quickest
_WIDER = 16  # cuts of a grid that are looked around, the best


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cut does, simulated: tokens per second of one stream and of all streams together, without and with drafts
    (``None``: there are none), seconds from a prompt of 4,096 tokens to its first token, seconds of a turn, and the
    longest context of one sequence."""

    one: float
    many: float
    ttft: float
    turn: float
    longest: int
    one_with_drafts: float | None = None
    many_with_drafts: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best cut for an aim. ``faster``: the best one by formula were there memory enough, if it does not fit;
    ``gain``: how many times as good it would be."""

    aim: Aim
    cut: Cut
    figures: Figures
    faster: Cut | None = None
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``best``: by aim; an aim is missing where nothing fits that meets it. ``screened``, ``simulated``: how many cuts
    were."""

    profiles: Profiles
    asked: Asked
    best: Mapping[Aim, Best]
    screened: int
    simulated: int


class Planner:
    """Finds the best of ``cuts``, or of all cuts, and remembers what it has computed of each."""

    def __init__(self, profiles: Profiles, asked: Asked, cuts: Sequence[Cut] | None = None) -> None:
        self.profiles, self.asked = profiles, asked
        self.memory, self.screen = Memory(profiles, asked), Screen(profiles, asked)
        self._budget = asked.budget(profiles)
        self._simulated: set[Cut] = set()
        self._many_screened, self._turn_screened = cache(self.screen.many), cache(self.screen.turn)
        self._turn, self._many = cache(self._simulated_turn), cache(self._simulated_many)
        self.cuts = self._every_cut() if cuts is None else list(cuts)

    def plan(self, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
        """The best cut for each aim."""
        best = {aim: found for aim in aims if (found := self.best(aim)) is not None}
        return Plan(self.profiles, self.asked, best, len(self.cuts), len(self._simulated))

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

    # -- one aim -------------------------------------------------------------------------------

    def best(self, aim: Aim) -> Best | None:
        """The best cut for an aim; ``None`` if none fits."""
        ranked = self._ranked(aim, self.cuts)
        if not ranked:
            return None
        cut = self._simulated_best(aim, ranked)
        free = max(self.cuts, key=lambda each: self.score(aim, each))
        if aim is Aim.CONTEXT or self.memory.fits(free, self.asked.context, self.asked.sequences(aim)):
            return Best(aim, cut, self.figures(cut))
        return Best(aim, cut, self.figures(cut), free, self.score(aim, free) / self.score(aim, cut))

    def _ranked(self, aim: Aim, cuts: Iterable[Cut]) -> list[Cut]:
        """The cuts that meet an aim's need of memory, the best by formula first; for the context those with the longest
        one."""
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

    def _simulated_best(self, aim: Aim, ranked: list[Cut]) -> Cut:
        """The best of cuts that are ranked by formula: the first ones are simulated, and the first of each number of
        machines."""
        tried = list(dict.fromkeys([*ranked[: self.asked.simulated], *_first_of_each_size(ranked)]))
        if aim is not Aim.THROUGHPUT and self.asked.acceptance is not None:
            rough = sorted(tried, key=lambda cut: self._turn(cut, self.asked.acceptance, is_rough=True).seconds)
            finalists = {*rough[:_FINALISTS], *_first_of_each_size(rough)}
            tried = [cut for cut in tried if cut in finalists]
        values = {cut: self.value(aim, cut) for cut in tried}
        most = max(values.values())
        fewest = min(len(cut.machines) for cut in tried if values[cut] >= _WORTH * most)
        same = [cut for cut in tried if len(cut.machines) == fewest]
        enough = _EQUAL * max(values[cut] for cut in same)
        return next(cut for cut in same if values[cut] >= enough)

    # -- figures -------------------------------------------------------------------------------

    def score(self, aim: Aim, cut: Cut) -> float:
        """What is to be as large as possible, by formula: turns of a chat per second, or tokens per second of all
        streams. For the context, the turns."""
        return self._many_screened(cut) if aim is Aim.THROUGHPUT else 1 / self._turn_screened(cut)

    def value(self, aim: Aim, cut: Cut) -> float:
        """The same, simulated."""
        acceptance = self.asked.acceptance
        return self._many(cut, acceptance) if aim is Aim.THROUGHPUT else 1 / self._turn(cut, acceptance).seconds

    def figures(self, cut: Cut) -> Figures:
        a = self.asked.acceptance
        return Figures(
            one=self._turn(cut, None).rate,
            many=self._many(cut, None),
            ttft=simulate.long_prompt(pipeline_of(self.profiles, cut), self._budget),
            turn=self._turn(cut, a).seconds,
            longest=self.memory.longest(cut),
            one_with_drafts=None if a is None else self._turn(cut, a).rate,
            many_with_drafts=None if a is None else self._many(cut, a),
        )

    def _simulated_turn(self, cut: Cut, acceptance: float | None, *, is_rough: bool = False) -> simulate.Turn:
        self._simulated.add(cut)
        machine = pipeline_of(self.profiles, cut)
        return simulate.turn(machine, self.asked, self._budget, acceptance, is_rough=is_rough)

    def _simulated_many(self, cut: Cut, acceptance: float | None) -> float:
        self._simulated.add(cut)
        return simulate.many(pipeline_of(self.profiles, cut), self.asked, acceptance)


def _first_of_each_size(ranked: Sequence[Cut]) -> Iterable[Cut]:
    """The first cut of each number of machines."""
    return {len(cut.machines): cut for cut in reversed(ranked)}.values()


def plan(profiles: Profiles, asked: Asked, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
    """The best cut for each aim.

    Raises:
        CannotFit: every machine is to have layers, and there are too few.
    """
    num_machines, num_layers = len(profiles.machines), profiles.model.num_layers
    if asked.uses_all and num_machines > num_layers:
        raise CannotFit(f"{num_machines} machines cannot share {num_layers} layers with one for each")
    return Planner(profiles, asked).plan(aims)
