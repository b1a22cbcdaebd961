"""Predicts what a step costs on all stages, links, the drafter and the coordinator. There is one model, which learns
once from each step's figures. The scheduler's objective, the choice of groups and drafts, the watch over stuck steps
and the planner of cuts read it."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.plan import Slice, StageFigures

_MOST_HOST = 0.5  # of a step: a longer delay had another cause
_UNTRIED = 3  # sizes beyond the known ones that may be tried
_LAST = 15  # measurements whose median is taken: a mean would follow a late wake-up


def _measurements() -> deque[float]:
    return deque(maxlen=_LAST)


@dataclass(slots=True)
class CostModel:
    """The costs of all stages.

    hop: seconds from the end of a step on one stage until it can start on the next, or until the scheduler has its
        result.
    drafts: costs of a round of drafts; its rows are the sequences that get drafts.
    host: seconds that the coordinator needs for a step besides drafts, computing and links.
    drafts_at_end: whether the last stage makes the drafts.
    drafts_at_once: the most drafts that a round makes; 0: one.
    """

    stages: list[StageCosts]
    hop: float = 0.0
    drafts: StageCosts = field(default_factory=StageCosts)
    host: float = 0.0
    drafts_at_end: bool = False
    drafts_at_once: int = 0
    _hops: deque[float] = field(default_factory=_measurements)
    _hosts: deque[float] = field(default_factory=_measurements)

    @classmethod
    def of(cls, num_stages: int) -> "CostModel":
        """Return a model of ``num_stages`` stages without any data."""
        return cls([StageCosts() for _ in range(num_stages)])

    # -- what was measured ---------------------------------------------------------------------

    def learn(
        self,
        slices: Sequence[Slice],
        figures: Sequence[StageFigures],
        returned_at: float,
        since: float | None = None,
    ) -> None:
        """Learn from a step's figures, also from the drafts that the last stage made after it. Times are seconds on the
        first stage's clock. ``returned_at``: when the figures came. ``since``: when the host had nothing left to do but
        this step and its drafts, if that is known."""
        shape = Shape.of(slices)
        for each in figures:
            if 0 <= each.stage < len(self.stages) and each.rows == shape.rows:
                self.stages[each.stage].took(shape, each.ended - each.started - each.copying)
        if len(figures) != len(self.stages):
            return
        first, asked = figures[0], [part.num_next for part in slices if part.num_next]
        if asked and figures[-1].drafting:
            self.drafted(len(asked), 1 if self.drafts_at_once else max(asked), figures[-1].drafting)
        if since is not None:
            self._hosts.append(min(max(0.0, first.started - since), _MOST_HOST * (first.ended - first.started)))
            self.host = median(self._hosts)
        if len(figures) > 1 and returned_at and all(each.rows for each in figures):
            # The time since its end on the first stage, less the time on the other stages and for drafts after it.
            others = sum(each.ended - each.received for each in figures[1:])
            on_links = returned_at - first.ended - others - figures[-1].drafting
            self._hops.append(max(0.0, on_links) / len(figures))
            self.hop = median(self._hops)

    def drafted(self, sequences: int, rounds: float, seconds: float) -> None:
        """Learn from ``rounds`` rounds of drafts for ``sequences`` sequences, which took ``seconds`` in all."""
        if sequences and rounds:
            self.drafts.took(Shape(sequences), seconds / rounds)

    # -- what it predicts ----------------------------------------------------------------------

    def drafting(self, sequences: int, drafts: int = 1) -> float:
        """Return the seconds of making ``drafts`` drafts for each of ``sequences`` sequences; 0 before the first
        round."""
        if not sequences or not drafts:
            return 0.0
        return (1 if self.drafts_at_once else drafts) * self.drafts.at(Shape(sequences))

    @property
    def num_sizes(self) -> int:
        """How many sizes of steps and of rounds of drafts were measured."""
        return len(self.drafts.sizes) + sum(len(stage.sizes) for stage in self.stages)

    def slowest(self, shape: Shape) -> float:
        """Return the seconds of a step on its slowest stage."""
        return max(stage.at(shape) for stage in self.stages)

    def cycle(self, shape: Shape, num_groups: int) -> float:
        """Return the seconds between two tokens of a sequence if the steps of all groups have this shape. One in twenty
        takes longer. In that time the slowest stage computes a step of each group, and one step passes all stages."""
        times = [stage.margin * stage.at(shape) for stage in self.stages]
        return max(num_groups * max(times), sum(times) + self.hop * (len(times) if len(times) > 1 else 0))

    def predicted(self, shape: Shape) -> float | None:
        """Return the seconds from sending a lone step of this shape until its result is back. One in twenty takes
        longer. Return None if too few steps have been seen, or none at least half as large."""
        return self.cycle(shape, 1) if all(stage.knows(shape) for stage in self.stages) else None

    def reading(self, start: int, count: int, size: int) -> float | None:
        """Return the seconds until ``count`` tokens of a prompt from position ``start`` have passed all stages in steps
        of ``size``, with nothing else under way. Return None if too little has been seen."""
        size = min(size, count)
        middle, last = (Shape().plus(start + first, size) for first in ((count - size) // 2, count - size))
        if not all(stage.knows(last) for stage in self.stages):
            return None
        filling = sum(stage.at(last) for stage in self.stages) - self.slowest(last)
        return -(-count // size) * (self.slowest(middle) + self.host) + filling

    @property
    def trusted_rows(self) -> int:
        """The most rows for which every stage's predictions are reliable."""
        return min(stage.trusted_rows for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the costs as plain numbers, for a simulation."""
        return {"stages": [stage.as_dict() for stage in self.stages], "hop": self.hop}


# Numbers of rows that fill the tiles of kernels: one row more costs another tile.
_EFFICIENT: tuple[int, ...] = (*range(4, 64, 4), *range(64, 256, 16), *range(256, 16384, 64))


def most_rows(costs: CostModel, decodes: Shape, start: int, most: int, num_groups: int, seconds: float) -> int:
    """Return how many rows of a prompt from position ``start`` may share a step with ``decodes``, so that these get
    their next token within ``seconds``. It is at most ``most``, and together with the decodes an efficient number for
    kernels.

    It is never 0: an objective that cannot be met must not keep prompts from being computed.
    """
    first = bisect_right(_EFFICIENT, decodes.rows)
    trusted = max(costs.trusted_rows, _EFFICIENT[min(first + _UNTRIED, len(_EFFICIENT) - 1)])
    last = bisect_right(_EFFICIENT, min(decodes.rows + most, trusted)) - 1
    low, high = first, max(first, last)
    while low < high:
        middle = -(-(low + high) // 2)
        shape = decodes.plus(start, _EFFICIENT[middle] - decodes.rows)
        low, high = (middle, high) if costs.cycle(shape, num_groups) <= seconds else (low, middle - 1)
    rows: int = _EFFICIENT[low] - decodes.rows
    return min(most, rows)


_LEAST_SIZE = 8  # tokens of a prompt in a step, if the prompt is not shorter
_HALVES = range(2, 9)  # of the fewest steps: from as many to four times as many
_WORTH = 0.97  # of the usual size's time: a smaller gain is not worth another cut of the same prompt
_ALIKE = 1.01  # times the quickest time: sizes this close are equal, and the largest is taken, so noise does not choose


def quickest_size(costs: CostModel, start: int, count: int, most: int, usual: int) -> int:
    """Return the tokens for each step of a prompt, up to ``most``, that get the last of its ``count`` tokens from
    position ``start`` through all stages first. Return ``usual`` if that is unknown or hardly slower.

    More steps fill the later stages sooner; fewer steps read the weights less often. Which matters more depends on the
    stages and on the positions that the prompt attends to.
    """
    fewest = -(-count // most)
    sizes = {-(-count // max(1, fewest * halves // 2)) for halves in _HALVES}
    times = {size: costs.reading(start, count, size) for size in {usual, *sizes} if size >= min(_LEAST_SIZE, count)}
    known = {size: seconds for size, seconds in times.items() if seconds is not None}
    if usual not in known:
        return usual
    least = min(known.values())
    best = max(size for size, seconds in known.items() if seconds <= _ALIKE * least)
    return best if known[best] < _WORTH * known[usual] else usual
