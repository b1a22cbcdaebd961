"""Finds the best cut that fits for each aim, by formulas. If figures are nearly equal, fewer machines are better: a
further machine that can fail must be worth it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil

from splitinfer.errors import CannotFit
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import LONG_PROMPT, Aim, Asked
from splitinfer.placement.bounds import assumed
from splitinfer.placement.cuts import Cut, near, on_grid, orders, stride_of
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.memory import Memory
from splitinfer.placement.pairs import exposed, pairs_of, with_pairs

_WORTH = 0.99  # share of the best figure that is enough for fewer machines
_AS_GOOD = 0.999  # share of the best figure from which the cut with the quickest slowest stage wins
_AS_LONG = 0.99  # of the longest context
CLEARLY = 1.1  # times as good; two machines as one stage must be
_WIDER = 16  # the best cuts of a grid, whose neighbours are tried


@dataclass(frozen=True, slots=True)
class CutFigures:
    """A cut's figures: tokens per second of one stream and of all streams together, without and with drafts (None: no
    drafts), seconds from a prompt of 4,096 tokens to its first token, seconds of a turn, and the longest context of one
    sequence."""

    one: float
    many: float
    ttft: float
    turn: float
    longest: int
    one_with_drafts: float | None = None
    many_with_drafts: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best cut for an aim. ``faster``: a better cut that does not fit into memory, if there is one. ``gain``: how
    many times as good it would be."""

    aim: Aim
    cut: Cut
    figures: CutFigures
    faster: Cut | None = None
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Ways:
    """The best cut for an aim in each way to use the machines, or None if no cut fits. ``alone``: all layers on the
    coordinator. ``pipeline``: each layer on one of several machines. ``tensor_parallel``: two machines are one stage,
    alone or in a pipeline."""

    alone: Best | None = None
    pipeline: Best | None = None
    tensor_parallel: Best | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The best cuts of some machines. ``best``: by aim, without the aims that no cut meets. ``tried``: the number of
    cuts. ``ways``: the best cut of each way to use the machines. ``profiles``: with each pair that may be one stage."""

    profiles: Profiles
    asked: Asked
    best: Mapping[Aim, Best]
    tried: int
    ways: Mapping[Aim, Ways] = field(default_factory=dict)


class Planner:
    """Finds the best of ``cuts``, or of all cuts, and remembers each cut's score."""

    def __init__(self, profiles: Profiles, asked: Asked, cuts: Sequence[Cut] | None = None) -> None:
        profiles = with_pairs(profiles)
        self.profiles, self.asked = profiles, asked
        self.memory, self.formulas = Memory(profiles, asked), Formulas(profiles, asked)
        self.score = cache(self._score)
        self.cuts = self._every_cut() if cuts is None else list(cuts)
        self._shared = [cut for cut in self.cuts if self.formulas.num_machines(cut) > len(cut.machines)]
        self._by_layers = [cut for cut in self.cuts if self.formulas.num_machines(cut) == len(cut.machines)]

    def plan(self, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
        """Return the best cut for each aim."""
        aims = tuple(aims)
        best = {aim: found for aim in aims if (found := self.best(aim)) is not None}
        return Plan(self.profiles, self.asked, best, len(self.cuts), {aim: self.ways(aim) for aim in aims})

    def ways(self, aim: Aim) -> Ways:
        """Return the best cut for an aim in each way to use the machines."""
        alone = [cut for cut in self._by_layers if len(cut.machines) == 1]
        several = [cut for cut in self._by_layers if len(cut.machines) > 1]
        return Ways(*(self._best_of(aim, cuts) for cuts in (alone, several, self._shared)))

    def _every_cut(self) -> list[Cut]:
        """Return every cut and order, or if they are too many, the cuts on a grid and near the best of them."""
        num_layers, every = self.profiles.model.num_layers, orders_of(self.profiles, self.asked)
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
        """Return the best cut for an aim. Return None if none fits."""
        return self._better(self._best_of(aim, self._by_layers), self._best_of(aim, self._shared))

    def _better(self, by_layers: Best | None, shared: Best | None) -> Best | None:
        """Return the better of two. Two machines as one stage must be clearly better: the costs of their sums are known
        less well, and if one machine stops, both stop."""
        if shared is None or exposed(self.profiles, shared.cut) is not None:
            return by_layers
        if by_layers is None:
            return shared
        aim, lengths = shared.aim, (by_layers.figures.longest, shared.figures.longest)
        if aim is Aim.CONTEXT and min(lengths) < _AS_LONG * max(lengths):
            return by_layers if lengths[0] > lengths[1] else shared
        return shared if self.score(aim, shared.cut) > CLEARLY * self.score(aim, by_layers.cut) else by_layers

    def _best_of(self, aim: Aim, cuts: Sequence[Cut]) -> Best | None:
        ranked = self._ranked(aim, cuts)
        if not ranked:
            return None
        best = self.score(aim, ranked[0])
        fewest = min((cut for cut in ranked if self.score(aim, cut) >= _WORTH * best), key=self.formulas.num_machines)
        cut = self._most_even(aim, fewest, ranked)
        free = max(cuts, key=lambda each: self.score(aim, each))
        if aim is Aim.CONTEXT or self.memory.fits(free, self.asked.context, self.asked.sequences(aim)):
            return Best(aim, cut, self.figures(cut))
        return Best(aim, cut, self.figures(cut), free, self.score(aim, free) / self.score(aim, cut))

    def _most_even(self, aim: Aim, best: Cut, cuts: Sequence[Cut]) -> Cut:
        """Return the cut with the quickest slowest stage, of the cuts for the same machines that are as good as
        ``best``: costs outside the formulas harm it least."""
        enough = _AS_GOOD * self.score(aim, best)
        alike = [cut for cut in cuts if cut.machines == best.machines and self.score(aim, cut) >= enough]
        return min(alike, key=lambda cut: max(self.formulas.seconds(cut, self.asked.streams)))

    def _ranked(self, aim: Aim, cuts: Iterable[Cut]) -> list[Cut]:
        """Return the cuts that fit into memory for an aim, the best first. For CONTEXT, only cuts with nearly the
        longest context count."""
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
        """Return the figure to maximise: tokens per second of all streams for THROUGHPUT, else turns of a chat per
        second."""
        if aim is Aim.THROUGHPUT:
            return self.formulas.many(cut, self.asked.acceptance)
        return 1 / self.formulas.turn(cut)

    def figures(self, cut: Cut) -> CutFigures:
        formulas, a = self.formulas, self.asked.acceptance
        return CutFigures(
            one=formulas.one(cut, None),
            many=formulas.many(cut, None),
            ttft=formulas.prompt(cut, LONG_PROMPT),
            turn=formulas.turn(cut),
            longest=self.memory.longest(cut),
            one_with_drafts=None if a is None else formulas.one(cut, a),
            many_with_drafts=None if a is None else formulas.many(cut, a),
        )


def orders_of(profiles: Profiles, asked: Asked) -> list[tuple[int, ...]]:
    """Return the orders of machines that a plan may choose from, also with pairs as one stage."""
    num_machines, pairs = pairs_of(profiles)
    return orders(num_machines, profiles.model.num_layers, uses_all=asked.uses_all, pairs=pairs)


def plan(profiles: Profiles, asked: Asked, aims: Iterable[Aim] = tuple(Aim)) -> Plan:
    """Return the best cut for each aim.

    Raises:
        CannotFit: every machine must have layers, but there are too few layers.
    """
    num_machines, num_layers = len(profiles.machines), profiles.model.num_layers
    if asked.uses_all and num_machines > num_layers:
        raise CannotFit(f"{num_machines} machines cannot share {num_layers} layers with one for each")
    return Planner(assumed(profiles), asked).plan(aims)
