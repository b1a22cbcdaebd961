"""What a step costs one stage, learned from its steps as they run.

The *fit* (``core.costs.fit``) knows how costs rise with rows and with what these attend to, also for shapes that were
never seen. Kernels change with the number of rows where there are few (8 may be faster than 7), so each number up to
``EXACT`` that was measured is known by itself; between two of them times are interpolated, and what a step attends to
more or less than those comes from the fit.

Machines drift, by heat and by what else they do, all sizes together: a common factor follows within some steps, one for
the fit and one for the sizes. (The fit learns from measured times, not from times divided by its factor: the two would
chase each other. A size is measured seldom, and remembers its ratio to the others.) The first steps of a size say
nothing of the factor, and their median is taken: if the first one was held up, the factor would follow it back, and all
other sizes would seem many times as fast as they are. The rest is in ``margin``: one in twenty of the last steps took
longer than predicted by this factor.

Of what was tried on recorded steps this predicts best (``scripts/README.md``).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from splitinfer.core.costs.fit import CHUNK, DECODE, EDGES, NUM_FEATURES, PER_CHUNK, PER_DECODE, WIDTHS, Fit, features
from splitinfer.core.costs.shape import Shape

EXACT = 16  # rows up to which each number has a ratio
_SOLVE_EVERY, _SOLVE_EACH, _SETTLED = 8, 16, 256  # steps; solved after each one at first, then less and less often
_DRIFT, _LEAST_WEIGHT = 0.2, 0.05  # of one step, in the factor and in its size's ratio
_MOST_OFF = 1.5  # times the prediction: larger ratios, and smaller than the inverse, are outliers and clipped
_FIRSTS = 5  # steps of a size from which its ratio is the median
_LAST = 64  # steps from which the margin is computed
_QUANTILE = 0.95
LEAST_MARGIN, _MOST_MARGIN = 1.02, 1.5
_TRUSTED_AFTER = 4  # steps
_FURTHER = 2  # predictions are trusted up to this multiple of the most rows seen
_NO_BOUND = 2**62  # positions


@dataclass(slots=True)
class _Size:
    """A number of rows: a shape, its seconds divided by the factor, those of the first steps, and how many it had."""

    shape: Shape
    seconds: float = 0.0
    firsts: list[float] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True)
class StageCosts:
    """One stage's seconds by the shape of a step; ``took`` refines them."""

    coefficients: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)
    num_seen: int = 0
    most_rows: int = 0
    factor: float = 1.0
    most_decode: int = 0  # positions that the single rows of a step attended to
    most_chunk: int = 0  # and the rows of its chunks
    _sizes: dict[int, _Size] = field(default_factory=dict)
    _sizes_factor: float = 1.0
    _fit: Fit = field(default_factory=Fit)
    _off: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))  # measured to predicted, of the last steps

    def at(self, shape: Shape) -> float:
        """Predicted seconds of a step of this shape; 0 before the first step."""
        if shape.rows > EXACT:
            return self._fitted(shape)
        below = max((rows for rows in self._sizes if rows <= shape.rows), default=None)
        above = min((rows for rows in self._sizes if rows >= shape.rows), default=None)
        if below is None or above is None:
            return self._fitted(shape)
        low, high = self._like(below, shape), self._like(above, shape)
        return low if below == above else low + (high - low) * (shape.rows - below) / (above - below)

    def _like(self, rows: int, shape: Shape) -> float:
        """Seconds of a step of a measured number of rows that attends to what ``shape`` does."""
        size = self._sizes[rows]
        as_measured = self._sizes_factor * size.seconds
        more = self._attending(shape) - self._attending(size.shape)
        return max(as_measured + more, as_measured / _MOST_OFF)

    def _fitted(self, shape: Shape) -> float:
        """The fit's seconds."""
        rows = sum(self.coefficients[i] * x for i, x in features(Shape(shape.rows)))
        return self.factor * rows + self._attending(shape)

    def _attending(self, shape: Shape) -> float:
        """The fit's seconds for what a step attends to. What the first steps attended to says nothing of what many
        times as much costs."""
        decode = PER_DECODE * min(shape.decode_context, _FURTHER * self.most_decode)
        chunk = PER_CHUNK * min(shape.chunk_context, _FURTHER * self.most_chunk)
        return self.factor * (self.coefficients[DECODE] * decode + self.coefficients[CHUNK] * chunk)

    def at_position(self, rows: int, position: int) -> float:
        """Predicted seconds of a step of decodes and drafts at a position: of single rows if the last step with so many
        was of those alone, else of blocks."""
        size = self._sizes.get(rows)
        is_single = size is not None and not size.shape.chunk_context
        return self.at(Shape(rows, rows * position) if is_single else Shape(rows, 0, rows * position))

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows, up to ``EXACT``, that steps had."""
        return sorted(self._sizes)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds for each of ``sizes``, of a step like the last of that size."""
        return {rows: self.at(size.shape) for rows, size in sorted(self._sizes.items())}

    @property
    def margin(self) -> float:
        """The factor by which one in twenty steps takes longer than predicted."""
        if len(self._off) < _TRUSTED_AFTER:
            return _MOST_MARGIN
        worst = sorted(self._off)[min(len(self._off) - 1, int(_QUANTILE * len(self._off)))]
        return min(max(worst, LEAST_MARGIN), _MOST_MARGIN)

    @property
    def trusted_rows(self) -> int:
        """The most rows for which predictions are reliable."""
        return _FURTHER * self.most_rows if self.num_seen >= _TRUSTED_AFTER else 0

    def knows(self, shape: Shape) -> bool:
        """Whether the prediction for this shape is reliable."""
        is_near = shape.chunk_context <= _FURTHER * self.most_chunk
        return is_near and 0 < self.trusted_rows >= shape.rows

    def took(self, shape: Shape, seconds: float) -> None:
        """Learn from one step of this shape."""
        if shape.rows < 1 or not 0 < seconds < math.inf:
            return
        expected, is_known = self.at(shape), shape.rows <= self.most_rows and self.knows(shape)
        measured = seconds
        if is_known and expected > 0:
            off = _clipped(seconds / expected)
            self._off.append(off)
            seconds = expected * off
            fitted = self._fitted(shape)
            self.factor *= _clipped(seconds / fitted) ** _DRIFT if fitted else 1.0
        self.most_rows = max(self.most_rows, shape.rows)
        self.most_decode = max(self.most_decode, shape.decode_context)
        self.most_chunk = max(self.most_chunk, shape.chunk_context)
        if shape.rows <= EXACT:
            self._learn_size(shape, measured)
        self._fit.add(shape, seconds)
        self.num_seen += 1
        if self._is_due or not is_known:  # what is larger than all before counts as known from now on
            self.coefficients = self._fit.solve()

    @property
    def _is_due(self) -> bool:
        """Whether the fit is solved after this step: after each at first, then more and more seldom."""
        every = 1 if self.num_seen < _SOLVE_EACH else _SOLVE_EVERY if self.num_seen < _SETTLED else 4 * _SOLVE_EVERY
        return self.num_seen % every == 0

    def _learn_size(self, shape: Shape, seconds: float) -> None:
        size = self._sizes.get(shape.rows)
        if size is None:
            size = self._sizes[shape.rows] = _Size(shape)
        size.count += 1
        if size.count <= _FIRSTS:
            more = self._attending(shape) - self._attending(size.shape)
            size.firsts.append(max(seconds - more, seconds / _MOST_OFF) / self._sizes_factor)
            size.seconds = median(size.firsts)
            return
        expected = self._like(shape.rows, shape)
        off = _clipped(seconds / expected)
        size.seconds = expected / self._sizes_factor * off ** max(_LEAST_WEIGHT, 1 / size.count)
        size.shape = shape
        self._sizes_factor *= off**_DRIFT

    def relative_to(self, other: "StageCosts") -> float | None:
        """How many times as long the steps that were learned from take by now as ``other`` predicts for their shapes;
        ``None`` before the first step, or where one of the two knows nothing."""
        mean = self._fit.mean_features
        if mean is None:
            return None
        own, predicted = (
            costs.factor * sum(c * x for c, x in zip(costs.coefficients, mean, strict=True)) for costs in (self, other)
        )
        return own / predicted if own > 0 and predicted > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """The fit as plain numbers, for ``from_dict``."""
        return {"coefficients": [self.factor * c for c in self.coefficients], "most_rows": self.most_rows}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "StageCosts":
        """The costs that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` has too few or too many coefficients, or negative ones.
        """
        coefficients = [float(c) for c in numbers["coefficients"]]
        if len(coefficients) != NUM_FEATURES or not all(0 <= c < math.inf for c in coefficients):
            raise ValueError(f"a stage's costs are {NUM_FEATURES} numbers, none negative")
        return cls._given(coefficients, int(numbers["most_rows"]))

    @classmethod
    def line(cls, base: float, per_row: float, decode: float = 0.0, chunk: float = 0.0) -> "StageCosts":
        """Linear costs in seconds: ``base`` for each step, ``per_row``, and ``decode`` and ``chunk`` for each position
        that single rows and rows of chunks attend to."""
        pieces = [per_row] * len(EDGES)
        return cls._given([base, *pieces, decode / PER_DECODE, chunk / PER_CHUNK])

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
        at = partial(_on_lines, known)
        rising = (at(EDGES[1]) - at(1)) / (EDGES[1] - 1)
        points = [max(0.0, at(1) - rising), *(at(edge) for edge in (*EDGES[1:], 2 * EDGES[-1]))]
        pieces = [max(0.0, b - a) / width for (a, b), width in zip(pairwise(points), WIDTHS, strict=True)]
        return cls._given([points[0], *pieces, decode / PER_DECODE, chunk / PER_CHUNK])

    @classmethod
    def _given(cls, coefficients: list[float], most_rows: int = 2**20) -> "StageCosts":
        return cls(coefficients, _SOLVE_EACH, most_rows, most_decode=_NO_BOUND, most_chunk=_NO_BOUND)

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of ``factor`` times as many layers, by the fit."""
        return self._with([self.factor * factor * c for c in self.coefficients])

    def plus(self, other: "StageCosts", most_rows: int | None = None) -> "StageCosts":
        """The costs of both, one after the other. ``most_rows``: the edge of a piece, behind which further rows cost
        nothing of ``other``."""
        more = [other.factor * c for c in other.coefficients]
        for i, edge in enumerate(EDGES, 1):
            if most_rows is not None and edge >= most_rows:
                more[i] = 0.0
        return self._with([self.factor * c + d for c, d in zip(self.coefficients, more, strict=True)])

    def _with(self, coefficients: list[float]) -> "StageCosts":
        return StageCosts(coefficients, self.num_seen, self.most_rows, 1.0, self.most_decode, self.most_chunk)


def _on_lines(points: Sequence[tuple[int, float]], x: float) -> float:
    """The y at ``x`` on the lines between points, the last one extended."""
    if len(points) == 1:
        return points[0][1]
    lines = list(pairwise(points))
    (a, low), (b, high) = next((line for line in lines if x <= line[1][0]), lines[-1])
    return low + (high - low) * (x - a) / (b - a)


def _clipped(ratio: float) -> float:
    return min(max(ratio, 1 / _MOST_OFF), _MOST_OFF)
