"""What steps cost all stages, the links between them, the drafter and the coordinator's host: one model, learned once
from each step's figures. The scheduler's objective, the choice of groups and drafts, the watch over stuck steps and
the planner of cuts read it."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.plan import Slice, StageFigures

_MOST_HOST = 0.5  # of a step: what took longer was something else
_UNTRIED = 3  # further sizes that are tried where nothing is known
_LAST = 15  # measurements whose median is what something usually takes: means follow a late wake-up now and then


def _measurements() -> deque[float]:
    return deque(maxlen=_LAST)


@dataclass(slots=True)
class CostModel:
    """The costs of all stages.

    hop: seconds from the end of a step on one stage until it can start on the next, or until its result is with the
        scheduler.
    drafts: of a round of drafts, whose rows are its sequences.
    host: seconds that the coordinator takes for a step besides drafts, computing and links.
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
        """Learn from a step's figures. Seconds on the first stage's clock: ``returned_at``, when they came; ``since``,
        from when on the host had nothing to do but this step and its drafts, if it is known."""
        shape = Shape.of(slices)
        for each in figures:
            if 0 <= each.stage < len(self.stages) and each.rows == shape.rows:
                self.stages[each.stage].took(shape, each.ended - each.started - each.copying)
        if len(figures) != len(self.stages):
            return
        first = figures[0]
        if since is not None:
            self._hosts.append(min(max(0.0, first.started - since), _MOST_HOST * (first.ended - first.started)))
            self.host = median(self._hosts)
        if len(figures) > 1 and returned_at and all(each.rows for each in figures):
            # From its end on the first stage, less the time on the others, and in which drafts were made behind it.
            others = sum(each.ended - each.received for each in figures[1:])
            on_links = returned_at - first.ended - others - figures[-1].drafting
            self._hops.append(max(0.0, on_links) / len(figures))
            self.hop = median(self._hops)

    def drafted(self, sequences: int, rounds: float, seconds: float) -> None:
        """Learn from ``rounds`` of drafts for so many sequences at a time."""
        if sequences and rounds:
            self.drafts.took(Shape(sequences), seconds / rounds)

    # -- what it predicts ----------------------------------------------------------------------

    def drafting(self, sequences: int, drafts: int = 1) -> float:
        """Return the seconds of so many drafts of each of some sequences; 0 before the first round."""
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
        """Return the seconds between two tokens of a sequence if the steps of all groups had this shape, exceeded one
        time in twenty. In that time the slowest stage computes a step for each group, and one step passes all
        stages."""
        times = [stage.margin * stage.at(shape) for stage in self.stages]
        return max(num_groups * max(times), sum(times) + self.hop * (len(times) if len(times) > 1 else 0))

    def predicted(self, shape: Shape) -> float | None:
        """Return the seconds from sending a step of this shape until its result is back, with nothing else under way,
        exceeded one time in twenty. Return None if too little has been seen: too few steps, or none as large as half of
        it."""
        return self.cycle(shape, 1) if all(stage.knows(shape) for stage in self.stages) else None

    def reading(self, start: int, count: int, size: int) -> float | None:
        """Return the seconds until ``count`` tokens of a prompt from position ``start`` have passed all stages,
        ``size`` in a step and nothing else under way. Return None if too little has been seen."""
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


# Numbers of rows that fill the tiles of kernels: with one row more, another tile is computed.
_EFFICIENT: tuple[int, ...] = (*range(4, 64, 4), *range(64, 256, 16), *range(256, 16384, 64))


def most_rows(costs: CostModel, decodes: Shape, start: int, most: int, num_groups: int, seconds: float) -> int:
    """Return the number of rows of a prompt from position ``start`` that may share a step with ``decodes``, so that
    these get their next token within ``seconds``: at most ``most``, and with the decodes an efficient number for
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


_LEAST_SIZE = 8  # tokens of a prompt in a step, where other sizes would do
_HALVES = range(2, 9)  # of the fewest steps: from as many to four times as many
_WORTH = 0.97  # of the usual size's time; for less the same prompt is not cut in another way than the last time
_ALIKE = 1.01  # times as long as the quickest; of sizes this close the largest, so that noise chooses none of them


def quickest_size(costs: CostModel, start: int, count: int, most: int, usual: int) -> int:
    """Return the tokens of each step of a prompt, up to ``most``, with which the last of its ``count`` tokens from
    position ``start`` has passed all stages first; ``usual`` where that is not known, or as good.

    More steps fill the stages behind the first sooner; fewer read the weights less often. Which is more depends on the
    stages and on what the prompt attends to.
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
