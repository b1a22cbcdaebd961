"""What a step costs each stage, learned from the steps as they run.

    seconds = base + per row, in pieces + decode * (positions that single rows attend to)
                                        + chunk * (positions that the rows of chunks attend to)

Weights are read once a step however many rows there are, so few rows are nearly free and many are not; where the change
comes differs from machine to machine. So the cost per row is a line in pieces (``_EDGES``), rising everywhere, and a
piece that was never measured continues the one before it. Attention costs what it looks at; single rows and chunks take
other kernels. (Features as in Niyama's and Vidur's predictors; here five numbers a stage, fitted while it runs.)

The fit is least squares on relative errors with nothing negative, old steps slowly forgotten. Machines drift, by heat
and by what else they do, all sizes together: a common factor on what the fit says follows within some steps. (The fit
learns from what was measured, not from that divided by the factor: the two would chase each other.) What both miss is
in ``margin``: as much longer than predicted are one in twenty of the last steps.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from splitinfer.core.plan import Slice, StageFigures

_EDGES = (0, 4, 8, 16, 32, 64, 128, 256, 512)  # rows at which the cost per row may change
_WIDTHS = tuple(b - a for a, b in zip(_EDGES, (*_EDGES[1:], 1024), strict=True))
_NUM_FEATURES = 1 + len(_EDGES) + 2
_DECODE, _CHUNK = _NUM_FEATURES - 2, _NUM_FEATURES - 1
_PER_DECODE, _PER_CHUNK = 1e-3, 1e-5  # so that all features are of about one size
_FORGETTING = 0.998  # of a step's weight, with each step after it
_SMOOTH, _SMALL = 1e-3, 1e-9  # weights of: pieces are alike; nothing is needed
_SOLVE_EVERY, _SOLVE_EACH, _SETTLED = 8, 16, 256  # steps; solved after each one at first, then ever less often
_DRIFT = 0.1  # weight of one step in the common factor
_MOST_OFF = 1.5  # a step that took so much longer or shorter says that something else happened
_LAST = 64  # steps that the margin looks at
_QUANTILE = 0.95
_LEAST_MARGIN, _MOST_MARGIN = 1.02, 1.5
_TRUSTED_AFTER = 4  # steps
_FURTHER = 2  # times the most rows seen, as far as predictions are trusted
_UNTRIED = 3  # sizes more that are tried where nothing is known


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step's cost depends on: its ``rows``; positions attended to by those that come alone, and by chunks."""

    rows: int = 0
    decode_context: int = 0
    chunk_context: int = 0

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> "Shape":
        """A plan's shape."""
        shape = cls()
        for part in slices:
            shape = shape.plus(part.start, len(part.token_ids))
        return shape

    @classmethod
    def of_single_rows(cls, positions: Iterable[int]) -> "Shape":
        """Sequences that decode, each one row."""
        shape = cls()
        for position in positions:
            shape = shape.plus(position, 1)
        return shape

    def plus(self, start: int, count: int) -> "Shape":
        """With ``count`` rows more of a sequence, from position ``start``.

        >>> Shape().plus(99, 1), Shape().plus(10, 3)
        (Shape(rows=1, decode_context=100, chunk_context=0), Shape(rows=3, decode_context=0, chunk_context=36))
        """
        if count == 1:
            return Shape(self.rows + 1, self.decode_context + start + 1, self.chunk_context)
        attended = count * start + count * (count + 1) // 2
        return Shape(self.rows + count, self.decode_context, self.chunk_context + attended)

    def _features(self) -> list[tuple[int, float]]:
        found = [(0, 1.0)]
        for i, (edge, width) in enumerate(zip(_EDGES, _WIDTHS, strict=True), 1):
            if self.rows <= edge:
                break
            within = self.rows - edge if i == len(_EDGES) else min(self.rows - edge, width)
            found.append((i, float(within)))
        if self.decode_context:
            found.append((_DECODE, self.decode_context * _PER_DECODE))
        if self.chunk_context:
            found.append((_CHUNK, self.chunk_context * _PER_CHUNK))
        return found


@dataclass(slots=True)
class StageCosts:
    """One stage's seconds by the shape of a step."""

    coefficients: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    num_seen: int = 0
    most_rows: int = 0
    factor: float = 1.0
    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)])
    _vector: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def at(self, shape: Shape) -> float:
        """Seconds that a step of this shape takes; 0 while nothing was seen."""
        return self.factor * sum(self.coefficients[i] * x for i, x in shape._features())

    @property
    def margin(self) -> float:
        """By how much one in twenty steps takes longer than predicted."""
        if len(self._ratios) < _TRUSTED_AFTER:
            return _MOST_MARGIN
        worst = sorted(self._ratios)[min(len(self._ratios) - 1, int(_QUANTILE * len(self._ratios)))]
        return min(max(worst, _LEAST_MARGIN), _MOST_MARGIN)

    @property
    def trusted_rows(self) -> int:
        """Up to how many rows predictions are worth something."""
        return _FURTHER * self.most_rows if self.num_seen >= _TRUSTED_AFTER else 0

    def took(self, shape: Shape, seconds: float) -> None:
        """One more step."""
        if shape.rows < 1 or not 0 < seconds < math.inf:
            return
        expected, is_known = self.at(shape), shape.rows <= self.most_rows and self.num_seen >= _TRUSTED_AFTER
        if is_known and expected > 0:
            off = min(max(seconds / expected, 1 / _MOST_OFF), _MOST_OFF)
            self._ratios.append(off)
            seconds = expected * off
            self.factor += _DRIFT * (off - 1) * self.factor
        self.most_rows = max(self.most_rows, shape.rows)
        self._add(shape._features(), seconds)
        self.num_seen += 1
        every = 1 if self.num_seen < _SOLVE_EACH else _SOLVE_EVERY if self.num_seen < _SETTLED else 4 * _SOLVE_EVERY
        if self.num_seen % every == 0:
            self._solve()

    def _add(self, features: list[tuple[int, float]], seconds: float) -> None:
        for row in self._matrix:
            row[:] = [_FORGETTING * value for value in row]
        self._vector[:] = [_FORGETTING * value for value in self._vector]
        weight = 1 / seconds**2
        for i, x in features:
            self._vector[i] += weight * x * seconds
            for j, y in features:
                self._matrix[i][j] += weight * x * y

    def _solve(self) -> None:
        """Least squares with nothing negative: whatever would be is left out, the worst first, and the rest solved
        anew."""
        matrix = [row[:] for row in self._matrix]
        scale = self._matrix[0][0]  # the sum of all weights
        for i in range(_NUM_FEATURES):
            matrix[i][i] += _SMALL * scale
        for i in range(2, len(_EDGES) + 1):
            alike = _SMOOTH * scale * _WIDTHS[i - 1] ** 2
            matrix[i][i] += alike
            matrix[i - 1][i - 1] += alike
            matrix[i][i - 1] -= alike
            matrix[i - 1][i] -= alike
        keep = list(range(_NUM_FEATURES))
        while keep:
            found = _solved([[matrix[i][j] for j in keep] for i in keep], [self._vector[i] for i in keep])
            worst = min(range(len(keep)), key=lambda at: found[at] * matrix[keep[at]][keep[at]] ** 0.5)
            if found[worst] >= 0:
                break
            del keep[worst]
        self.coefficients = [0.0] * _NUM_FEATURES
        for at, i in enumerate(keep):
            self.coefficients[i] = found[at]

    def as_dict(self) -> dict[str, Any]:
        """What a simulation needs, as plain numbers."""
        return {"coefficients": [self.factor * c for c in self.coefficients], "most_rows": self.most_rows}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "StageCosts":
        """The costs that ``as_dict`` gave.

        Raises:
            ValueError: they are none.
        """
        coefficients = [float(c) for c in said["coefficients"]]
        if len(coefficients) != _NUM_FEATURES or not all(0 <= c < math.inf for c in coefficients):
            raise ValueError(f"a stage's costs are {_NUM_FEATURES} numbers, none negative")
        return cls(coefficients, num_seen=_SOLVE_EACH, most_rows=int(said["most_rows"]))

    @classmethod
    def line(cls, base: float, per_row: float, decode: float = 0.0, chunk: float = 0.0) -> "StageCosts":
        """Seconds: ``base`` for each step, ``per_row``, and for each position that single rows, or those of chunks,
        attend to."""
        pieces = [per_row] * len(_EDGES)
        return cls([base, *pieces, decode / _PER_DECODE, chunk / _PER_CHUNK], num_seen=_SOLVE_EACH, most_rows=2**20)

    @classmethod
    def through(cls, seconds: Mapping[int, float], decode: float = 0.0, chunk: float = 0.0) -> "StageCosts":
        """Seconds of steps of some numbers of rows, with lines between them and the last one going on; and for each
        position that a single row, or one of a chunk, attends to."""
        known = sorted(seconds.items())
        if known[0][0] < 1 or any(b < a for (_, a), (_, b) in pairwise(known)):
            raise ValueError("more rows than one cannot take less time than one")

        def at(rows: float) -> float:
            if len(known) == 1:
                return known[0][1]
            lines = list(pairwise(known))
            (n, low), (m, high) = next((line for line in lines if rows <= line[1][0]), lines[-1])
            return low + (high - low) * (rows - n) / (m - n)

        rising = (at(_EDGES[1]) - at(1)) / (_EDGES[1] - 1)
        points = [max(0.0, at(1) - rising), *(at(edge) for edge in (*_EDGES[1:], 2 * _EDGES[-1]))]
        pieces = [max(0.0, b - a) / width for (a, b), width in zip(pairwise(points), _WIDTHS, strict=True)]
        costs = [points[0], *pieces, decode / _PER_DECODE, chunk / _PER_CHUNK]
        return cls(costs, num_seen=_SOLVE_EACH, most_rows=2**20)

    def scaled(self, factor: float) -> "StageCosts":
        """The same machine with more or fewer layers."""
        coefficients = [self.factor * factor * c for c in self.coefficients]
        return StageCosts(coefficients, num_seen=self.num_seen, most_rows=self.most_rows)


def _solved(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The solution of a symmetric, positive definite system, by elimination."""
    rows = [[*row, right] for row, right in zip(matrix, vector, strict=True)]
    size = len(rows)
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            if share:
                row[i:] = [a - share * b for a, b in zip(row[i:], pivot[i:], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found


@dataclass(slots=True)
class CostModel:
    """All stages' costs, and ``hop``: the seconds from the end of a step on one stage until it can begin on the next,
    or until its result is with the scheduler. ``is_known``: these are what they are, and no step teaches more."""

    stages: list[StageCosts]
    hop: float = 0.0
    is_known: bool = False

    @classmethod
    def of(cls, num_stages: int) -> "CostModel":
        """Of stages that nothing is known about."""
        return cls([StageCosts() for _ in range(num_stages)])

    def learn(self, slices: Sequence[Slice], figures: Sequence[StageFigures], heard: float) -> None:
        """A step's figures have come, at ``heard`` on the first stage's clock."""
        if self.is_known:
            return
        shape = Shape.of(slices)
        for each in figures:
            if 0 <= each.stage < len(self.stages) and each.rows == shape.rows:
                self.stages[each.stage].took(shape, each.ended - each.started - each.copying)
        if len(figures) == len(self.stages) > 1 and heard:
            there = sum(each.ended - each.received for each in figures[1:])
            one = max(0.0, heard - figures[0].ended - there) / len(figures)
            self.hop = one if self.hop == 0.0 else self.hop + _DRIFT * (one - self.hop)

    def as_dict(self) -> dict[str, Any]:
        """What a simulation needs, as plain numbers."""
        return {"stages": [stage.as_dict() for stage in self.stages], "hop": self.hop}

    def slowest(self, shape: Shape) -> float:
        """Seconds that a step takes on the stage that takes longest."""
        return max(stage.at(shape) for stage in self.stages)

    def cycle(self, shape: Shape, num_groups: int) -> float:
        """Seconds between two tokens of a sequence, if the steps of all groups were like this one; one in twenty takes
        longer. The slowest stage has to do one for each group; and a step has to come through all of them."""
        times = [(_LEAST_MARGIN if self.is_known else stage.margin) * stage.at(shape) for stage in self.stages]
        return max(num_groups * max(times), sum(times) + self.hop * (len(times) if len(times) > 1 else 0))

    @property
    def trusted_rows(self) -> int:
        """Up to how many rows predictions are worth something."""
        return min(stage.trusted_rows for stage in self.stages)


# Rows of a step that kernels like: they work on so many at a time, and the last of them cost nothing.
_LIKED: tuple[int, ...] = (*range(4, 64, 4), *range(64, 256, 16), *range(256, 16384, 64))


def most_rows(costs: CostModel, decodes: Shape, start: int, most: int, num_groups: int, seconds: float) -> int:
    """How many rows of a prompt that stands at ``start``, at most ``most``, may go with ``decodes``, so that these get
    their next token within ``seconds``; with the decodes they are a number that kernels like.

    Never none: an objective that cannot be kept must not keep prompts from being read.
    """
    first = bisect_right(_LIKED, decodes.rows)
    trusted = max(costs.trusted_rows, _LIKED[min(first + _UNTRIED, len(_LIKED) - 1)])
    last = bisect_right(_LIKED, min(decodes.rows + most, trusted)) - 1
    low, high = first, max(first, last)
    while low < high:
        middle = -(-(low + high) // 2)
        shape = decodes.plus(start, _LIKED[middle] - decodes.rows)
        low, high = (middle, high) if costs.cycle(shape, num_groups) <= seconds else (low, middle - 1)
    rows: int = _LIKED[low] - decodes.rows
    return min(most, rows)
