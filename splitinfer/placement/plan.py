"""The best cut for each aim, with all its figures.

Every cut and order is screened by formula; the best of those that fit go through the simulator, roughly, and the best
of these once more, as long as it takes to be sure; the best of those is the plan. Formulas leave out what the scheduler
does between steps, the simulator has the luck of its drafts: where simulated figures are as good as equal, the formula
decides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
_WIDER = 16  # cuts of a grid that are looked around, the best
_FINALISTS = 4  # cuts whose rough figures are the best, of which the figures are computed in full


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

    @property
    def memory(self) -> Memory:
        """The memory of all cuts."""
        return Memory(self.profiles, self.asked)


@dataclass(slots=True)
class Planner:
    """Finds the best cuts, and remembers what it has simulated."""

    profiles: Profiles
    asked: Asked
    memory: Memory = field(init=False)
    screen: Screen = field(init=False)
    _turns: dict[tuple[Cut, float | None, simulate.Effort], simulate.Turn] = field(default_factory=dict)  # simulated
    _rates: dict[tuple[Cut, float | None], float] = field(default_factory=dict)  # of many streams, simulated
    _scores: dict[tuple[Cut, bool], float] = field(default_factory=dict)  # by formula

    def __post_init__(self) -> None:
        self.memory, self.screen = Memory(self.profiles, self.asked), Screen(self.profiles, self.asked)

    def plan(self, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
        """The best cut for each aim."""
        cuts, best = self.candidates(), dict[Aim, Best]()
        for aim in aims:
            found = self.best(aim, cuts)
            if found is not None:
                best[aim] = found
        simulated = {key[0] for key in (*self._turns, *self._rates)}
        return Plan(self.profiles, self.asked, best, len(cuts), len(simulated))

    def candidates(self) -> list[Cut]:
        """Every cut and order, or where there are too many those on a grid and those near the best of them."""
        num_layers = self.profiles.model.num_layers
        every = orders(len(self.profiles.machines), num_layers, uses_all=self.asked.uses_all)
        stride = stride_of(every, num_layers)
        coarse = list(on_grid(every, num_layers, stride))
        if stride == 1:
            return coarse
        found = dict.fromkeys(coarse)
        for aim in Aim:
            found.update(dict.fromkeys(self._refined(aim, coarse, stride)))
        return list(found)

    def _refined(self, aim: Aim, cuts: Iterable[Cut], distance: int) -> list[Cut]:
        """The best of ``cuts`` for an aim, and those near them, nearer and nearer until there is no better one."""
        best: list[Cut] = []
        while True:
            before, best = best, self._ranked(aim, self._fitting(aim, cuts))[:_WIDER]
            if distance == 1 and best[:1] == before[:1]:
                return list(dict.fromkeys([*best, *cuts]))
            distance = -(-distance // 2)
            cuts = list(near(best, distance))

    # -- one aim -------------------------------------------------------------------------------

    def best(self, aim: Aim, cuts: list[Cut]) -> Best | None:
        """The best of ``cuts`` for an aim; ``None`` if none fits."""
        fitting = self._fitting(aim, cuts)
        if not fitting:
            return None
        cut = self._simulated_best(aim, self._ranked(aim, fitting))
        faster, gain = self._without_bounds(aim, cuts, cut)
        return Best(aim, cut, self.figures(cut), faster, gain)

    def _simulated_best(self, aim: Aim, ranked: list[Cut]) -> Cut:
        """The best of cuts that are ranked by formula: the first ones are simulated, and the first of each number of
        machines."""
        of_each = {len(cut.machines): cut for cut in reversed(ranked)}
        tried = dict.fromkeys([*ranked[: self.asked.simulated], *of_each.values()])
        final = self._finalists(aim, list(tried))
        values = {cut: self.value(aim, cut) for cut in final}
        most = max(values.values())
        fewest = min(len(cut.machines) for cut in final if values[cut] >= _WORTH * most)
        same = [cut for cut in final if len(cut.machines) == fewest]
        enough = _EQUAL * max(values[cut] for cut in same)
        return next(cut for cut in same if values[cut] >= enough)

    def _finalists(self, aim: Aim, tried: list[Cut]) -> list[Cut]:
        """The best of some cuts by rough figures, and the best of each number of machines; in the order given."""
        if aim is Aim.THROUGHPUT or len(tried) <= _FINALISTS:
            return tried
        ranked = sorted(tried, key=lambda cut: self.value(aim, cut, simulate.ROUGH), reverse=True)
        of_each = {len(cut.machines): cut for cut in reversed(ranked)}
        kept = {*ranked[:_FINALISTS], *of_each.values()}
        return [cut for cut in tried if cut in kept]

    def _fitting(self, aim: Aim, cuts: Iterable[Cut]) -> list[Cut]:
        """The cuts that meet an aim's need of memory; for the context those with the longest one."""
        if aim is not Aim.CONTEXT:
            sequences = self.asked.sequences(aim)
            return [cut for cut in cuts if self.memory.fits(cut, self.asked.context, sequences)]
        lengths, most = dict[Cut, int](), 1
        for cut in cuts:
            if self.memory.fits(cut, ceil(_AS_LONG * most), 1):
                lengths[cut] = self.memory.longest(cut)
                most = max(most, lengths[cut])
        return [cut for cut, length in lengths.items() if 0 < length >= _AS_LONG * most]

    def _ranked(self, aim: Aim, cuts: Iterable[Cut]) -> list[Cut]:
        """The cuts in the order of an aim's formula, the best first."""
        return sorted(cuts, key=lambda cut: self._score(cut, aim), reverse=True)

    def _score(self, cut: Cut, aim: Aim) -> float:
        """A cut by an aim's formula."""
        key = cut, aim is Aim.THROUGHPUT
        if key not in self._scores:
            self._scores[key] = self.screen.score(cut, aim)
        return self._scores[key]

    def _without_bounds(self, aim: Aim, cuts: Iterable[Cut], chosen: Cut) -> tuple[Cut | None, float]:
        """The best cut by formula if memory were no bound, and how many times as good it were; ``None`` if it fits."""
        if aim is Aim.CONTEXT:
            return None, 1.0
        free = max(cuts, key=lambda cut: self._score(cut, aim))
        if self.memory.fits(free, self.asked.context, self.asked.sequences(aim)):
            return None, 1.0
        return free, self._score(free, aim) / self._score(chosen, aim)

    def value(self, aim: Aim, cut: Cut, effort: simulate.Effort = simulate.FULL) -> float:
        """What is to be as large as possible, simulated: tokens per second of all streams, or turns per second."""
        if aim is Aim.THROUGHPUT:
            return self._many(cut, self.asked.acceptance)
        return 1 / self._turn(cut, self.asked.acceptance, effort).seconds

    # -- figures -------------------------------------------------------------------------------

    def figures(self, cut: Cut) -> Figures:
        """All figures of a cut."""
        a = self.asked.acceptance
        return Figures(
            one=self._one(cut, None),
            many=self._many(cut, None),
            ttft=simulate.long_prompt(pipeline_of(self.profiles, cut), self._budget),
            turn=self._turn(cut, a).seconds,
            longest=self.memory.longest(cut),
            one_with_drafts=None if a is None else self._one(cut, a),
            many_with_drafts=None if a is None else self._many(cut, a),
        )

    @property
    def _budget(self) -> int:
        return self.asked.budget(self.profiles)

    def _one(self, cut: Cut, acceptance: float | None) -> float:
        """Tokens per second of one stream."""
        return self._turn(cut, acceptance).rate

    def _turn(self, cut: Cut, acceptance: float | None, effort: simulate.Effort = simulate.FULL) -> simulate.Turn:
        effort = simulate.FULL if acceptance is None else effort  # which makes no difference then
        key = cut, acceptance, effort
        if key not in self._turns:
            machine = pipeline_of(self.profiles, cut)
            self._turns[key] = simulate.turn(machine, self.asked, self._budget, acceptance, effort)
        return self._turns[key]

    def _many(self, cut: Cut, acceptance: float | None) -> float:
        key = cut, acceptance
        if key not in self._rates:
            self._rates[key] = simulate.many(pipeline_of(self.profiles, cut), self.asked, acceptance)
        return self._rates[key]


def plan(profiles: Profiles, asked: Asked, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
    """The best cut for each aim.

    Raises:
        CannotFit: every machine is to have layers, and there are too few.
    """
    num_machines, num_layers = len(profiles.machines), profiles.model.num_layers
    if asked.uses_all and num_machines > num_layers:
        raise CannotFit(f"{num_machines} machines cannot all have one of {num_layers} layers")
    return Planner(profiles, asked).plan(aims)
