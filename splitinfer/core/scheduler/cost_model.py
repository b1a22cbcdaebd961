"""A model of what a step costs each stage, fitted to the steps as they run.

    seconds = base + per row, in pieces + decode * (positions that single rows attend to)
                                        + chunk * (positions that the rows of chunks attend to)

Weights are read once a step however many rows there are, so few rows are nearly free and many are not; where the change
comes differs from machine to machine. So the cost per row is a line in pieces (``_EDGES``), rising everywhere, and a
piece that was never measured continues the one before it. The cost of attention is proportional to the positions
attended to; single rows and chunks use different kernels. (The features are those of Niyama's and Vidur's predictors;
here they are fitted while the pipeline runs.)

The fit is least squares on relative errors without negative coefficients, and forgets old steps slowly. Machines drift,
by heat and by what else they do, all sizes together: a common factor on the fit's predictions follows within some
steps. (The fit learns from measured times, not from times divided by the factor: the two would chase each other.) The
rest is in ``margin``: one in twenty of the last steps took longer than predicted by this factor.
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
_FORGETTING = 0.998  # a step's weight is multiplied by this with each step after it
_SMOOTH, _SMALL = 1e-3, 1e-9  # weights of the penalties for unequal pieces, and for any coefficient
_SOLVE_EVERY, _SOLVE_EACH, _SETTLED = 8, 16, 256  # steps; solved after each one at first, then less and less often
_DRIFT = 0.1  # weight of one step in the common factor
_MOST_OFF = 1.5  # times the prediction: larger ratios, and smaller than the inverse, are outliers and clipped
_LAST = 64  # steps from which the margin is computed
_QUANTILE = 0.95
_LEAST_MARGIN, _MOST_MARGIN = 1.02, 1.5
_TRUSTED_AFTER = 4  # steps
_FURTHER = 2  # predictions are trusted up to this multiple of the most rows seen
_NO_BOUND = 2**62  # positions
_UNTRIED = 3  # further sizes that are tried where nothing is known


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step's cost depends on: ``rows``, and the positions attended to by single rows and by rows of chunks."""

    rows: int = 0
    decode_context: int = 0
    chunk_context: int = 0

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> "Shape":
        """The shape of a step with these slices."""
        shape = cls()
        for part in slices:
            shape = shape.plus(part.start, len(part.token_ids))
        return shape

    @classmethod
    def of_single_rows(cls, positions: Iterable[int]) -> "Shape":
        """The shape of a step of decodes: one row at each of ``positions``."""
        shape = cls()
        for position in positions:
            shape = shape.plus(position, 1)
        return shape

    def plus(self, start: int, count: int) -> "Shape":
        """The shape with ``count`` more rows of a sequence, from position ``start``.

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
    """One stage's seconds by the shape of a step; ``took`` refines the fit."""

    coefficients: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    num_seen: int = 0
    most_rows: int = 0
    factor: float = 1.0
    most_attended: int = 0  # positions, by the rows of a step's chunks
    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)])
    _vector: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def at(self, shape: Shape) -> float:
        """Predicted seconds of a step of this shape; 0 before the first step."""
        return self.factor * sum(self.coefficients[i] * x for i, x in shape._features())

    @property
    def margin(self) -> float:
        """The factor by which one in twenty steps takes longer than predicted."""
        if len(self._ratios) < _TRUSTED_AFTER:
            return _MOST_MARGIN
        worst = sorted(self._ratios)[min(len(self._ratios) - 1, int(_QUANTILE * len(self._ratios)))]
        return min(max(worst, _LEAST_MARGIN), _MOST_MARGIN)

    @property
    def trusted_rows(self) -> int:
        """The most rows for which predictions are reliable."""
        return _FURTHER * self.most_rows if self.num_seen >= _TRUSTED_AFTER else 0

    def knows(self, shape: Shape) -> bool:
        """Whether the prediction for this shape is reliable."""
        is_near = shape.chunk_context <= _FURTHER * self.most_attended
        return is_near and 0 < self.trusted_rows >= shape.rows

    def took(self, shape: Shape, seconds: float) -> None:
        """Learn from one step of this shape."""
        if shape.rows < 1 or not 0 < seconds < math.inf:
            return
        expected, is_known = self.at(shape), shape.rows <= self.most_rows and self.knows(shape)
        if is_known and expected > 0:
            off = min(max(seconds / expected, 1 / _MOST_OFF), _MOST_OFF)
            self._ratios.append(off)
            seconds = expected * off
            self.factor += _DRIFT * (off - 1) * self.factor
        self.most_rows = max(self.most_rows, shape.rows)
        self.most_attended = max(self.most_attended, shape.chunk_context)
        self._add(shape._features(), seconds)
        self.num_seen += 1
        every = 1 if self.num_seen < _SOLVE_EACH else _SOLVE_EVERY if self.num_seen < _SETTLED else 4 * _SOLVE_EVERY
        if self.num_seen % every == 0 or not is_known:  # what is larger than all before counts as known from now on
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
        """Solve for non-negative least squares: leave out the most negative coefficient and solve again, until none is
        negative."""
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
            found = solved([[matrix[i][j] for j in keep] for i in keep], [self._vector[i] for i in keep])
            worst = min(range(len(keep)), key=lambda at: found[at] * matrix[keep[at]][keep[at]] ** 0.5)
            if found[worst] >= 0:
                break
            del keep[worst]
        self.coefficients = [0.0] * _NUM_FEATURES
        for at, i in enumerate(keep):
            self.coefficients[i] = found[at]

    def relative_to(self, other: "StageCosts") -> float | None:
        """How many times as long the steps that were learned from take by now as ``other`` predicts for their shapes;
        ``None`` before the first step, or where one of the two knows nothing."""
        weight = self._matrix[0][0]
        if not weight:
            return None
        mean = [x / weight for x in self._matrix[0]]  # of the features, the weights those of the fit
        own, predicted = (
            costs.factor * sum(c * x for c, x in zip(costs.coefficients, mean, strict=True)) for costs in (self, other)
        )
        return own / predicted if own > 0 and predicted > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """The costs as plain numbers, for ``from_dict``."""
        return {"coefficients": [self.factor * c for c in self.coefficients], "most_rows": self.most_rows}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "StageCosts":
        """The costs that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` has too few or too many coefficients, or negative ones.
        """
        coefficients = [float(c) for c in numbers["coefficients"]]
        if len(coefficients) != _NUM_FEATURES or not all(0 <= c < math.inf for c in coefficients):
            raise ValueError(f"a stage's costs are {_NUM_FEATURES} numbers, none negative")
        return cls(coefficients, num_seen=_SOLVE_EACH, most_rows=int(numbers["most_rows"]), most_attended=_NO_BOUND)

    @classmethod
    def line(cls, base: float, per_row: float, decode: float = 0.0, chunk: float = 0.0) -> "StageCosts":
        """Linear costs in seconds: ``base`` for each step, ``per_row``, and ``decode`` and ``chunk`` for each position
        that single rows and rows of chunks attend to."""
        pieces = [per_row] * len(_EDGES)
        return cls._given([base, *pieces, decode / _PER_DECODE, chunk / _PER_CHUNK])

    @classmethod
    def through(cls, seconds: Mapping[int, float], decode: float = 0.0, chunk: float = 0.0) -> "StageCosts":
        """Costs that interpolate ``seconds`` by number of rows, and extrapolate the last line; ``decode`` and ``chunk``
        are for each position that single rows and rows of chunks attend to.

        Raises:
            ValueError: a number of rows below 1, or fewer seconds for more rows.
        """
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
        return cls._given([points[0], *pieces, decode / _PER_DECODE, chunk / _PER_CHUNK])

    @classmethod
    def _given(cls, coefficients: list[float]) -> "StageCosts":
        return cls(coefficients, num_seen=_SOLVE_EACH, most_rows=2**20, most_attended=_NO_BOUND)

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of ``factor`` times as many layers."""
        coefficients = [self.factor * factor * c for c in self.coefficients]
        return StageCosts(coefficients, self.num_seen, self.most_rows, most_attended=self.most_attended)

    def plus(self, other: "StageCosts", most_rows: int | None = None) -> "StageCosts":
        """The costs of both, one after the other. ``most_rows``: the edge of a piece, behind which further rows cost
        nothing of ``other``."""
        more = [other.factor * c for c in other.coefficients]
        for i, edge in enumerate(_EDGES, 1):
            if most_rows is not None and edge >= most_rows:
                more[i] = 0.0
        coefficients = [self.factor * c + d for c, d in zip(self.coefficients, more, strict=True)]
        return StageCosts(coefficients, self.num_seen, self.most_rows, most_attended=self.most_attended)


def solved(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a symmetric, positive definite system by elimination."""
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
    """The costs of all stages.

    hop: seconds from the end of a step on one stage until it can start on the next, or until its result is with the
        scheduler.
    is_known: whether the costs are given and ``learn`` changes nothing.
    """

    stages: list[StageCosts]
    hop: float = 0.0
    is_known: bool = False

    @classmethod
    def of(cls, num_stages: int) -> "CostModel":
        """A model of ``num_stages`` stages without any data."""
        return cls([StageCosts() for _ in range(num_stages)])

    def learn(self, slices: Sequence[Slice], figures: Sequence[StageFigures], returned_at: float) -> None:
        """Learn from a step's figures. ``returned_at``: when they came, in seconds on the first stage's clock."""
        if self.is_known:
            return
        shape = Shape.of(slices)
        for each in figures:
            if 0 <= each.stage < len(self.stages) and each.rows == shape.rows:
                self.stages[each.stage].took(shape, each.ended - each.started - each.copying)
        if len(figures) == len(self.stages) > 1 and returned_at:
            on_workers = sum(each.ended - each.received for each in figures[1:])
            hop = max(0.0, returned_at - figures[0].ended - on_workers) / len(figures)
            self.hop = hop if self.hop == 0.0 else self.hop + _DRIFT * (hop - self.hop)

    def as_dict(self) -> dict[str, Any]:
        """The costs as plain numbers, for a simulation."""
        return {"stages": [stage.as_dict() for stage in self.stages], "hop": self.hop}

    def slowest(self, shape: Shape) -> float:
        """Seconds of a step on its slowest stage."""
        return max(stage.at(shape) for stage in self.stages)

    def cycle(self, shape: Shape, num_groups: int) -> float:
        """Seconds between two tokens of a sequence if the steps of all groups had this shape, exceeded one time in
        twenty. In that time the slowest stage computes a step for each group, and one step passes all stages."""
        times = [(_LEAST_MARGIN if self.is_known else stage.margin) * stage.at(shape) for stage in self.stages]
        return max(num_groups * max(times), sum(times) + self.hop * (len(times) if len(times) > 1 else 0))

    def predicted(self, shape: Shape) -> float | None:
        """Seconds from sending a step of this shape until its result is back, with nothing else under way, exceeded one
        time in twenty; ``None`` where too little has been seen: too few steps, or none as large as half of it."""
        return self.cycle(shape, 1) if all(stage.knows(shape) for stage in self.stages) else None

    @property
    def trusted_rows(self) -> int:
        """The most rows for which every stage's predictions are reliable."""
        return min(stage.trusted_rows for stage in self.stages)


# Numbers of rows that fill the tiles of kernels: with one row more, another tile is computed.
_EFFICIENT: tuple[int, ...] = (*range(4, 64, 4), *range(64, 256, 16), *range(256, 16384, 64))


def most_rows(costs: CostModel, decodes: Shape, start: int, most: int, num_groups: int, seconds: float) -> int:
    """The number of rows of a prompt from position ``start`` that may share a step with ``decodes``, so that these get
    their next token within ``seconds``: at most ``most``, and with the decodes an efficient number for kernels.

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
