"""Least squares on relative errors, without negative coefficients, that forgets old steps slowly.

    seconds = base + per row, in pieces + decode * (positions that single rows attend to)
                                        + chunk * (positions that the rows of chunks attend to)

Weights are read once a step however many rows there are, so few rows are nearly free and many are not; where the change
comes differs from machine to machine. So the cost per row is a line in pieces (``EDGES``), rising everywhere, and a
piece that was never measured continues the one before it. What a single size of step cannot tell apart counts as the
base's. The cost of attention is proportional to the positions attended to; single rows and chunks have other kernels.
(The features are those of Niyama's and Vidur's predictors; here they are fitted while the pipeline runs.)
"""

from dataclasses import dataclass, field

from splitinfer.core.costs.shape import Shape

EDGES = (0, 4, 8, 16, 32, 64, 128, 256, 512)  # rows at which the cost per row may change
WIDTHS = tuple(b - a for a, b in zip(EDGES, (*EDGES[1:], 1024), strict=True))
NUM_FEATURES = 1 + len(EDGES) + 2
PER_DECODE, PER_CHUNK = 1e-3, 1e-5  # so that all features are of about one size
DECODE, CHUNK = NUM_FEATURES - 2, NUM_FEATURES - 1
_FORGETTING = 0.998  # a step's weight is multiplied by this with each step after it
_SMOOTH = 1e-4  # weight of the penalty for unequal pieces
# Weights of the penalties for a coefficient: what little is attended to explains nothing that the base can explain.
_SMALL_BASE, _SMALL, _SMALL_ATTENTION = 1e-10, 1e-7, 1e-4


def features(shape: Shape) -> list[tuple[int, float]]:
    """The features of a step that are not zero, by their index."""
    found = [(0, 1.0)]
    for i, (edge, width) in enumerate(zip(EDGES, WIDTHS, strict=True), 1):
        if shape.rows <= edge:
            break
        within = shape.rows - edge if i == len(EDGES) else min(shape.rows - edge, width)
        found.append((i, float(within)))
    if shape.decode_context:
        found.append((DECODE, shape.decode_context * PER_DECODE))
    if shape.chunk_context:
        found.append((CHUNK, shape.chunk_context * PER_CHUNK))
    return found


@dataclass(slots=True)
class Fit:
    """The sums of the normal equations: weights times products of features, and times features and seconds."""

    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)])
    _vector: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)

    def add(self, shape: Shape, seconds: float) -> None:
        """Add a step."""
        for row in self._matrix:
            row[:] = [_FORGETTING * value for value in row]
        self._vector[:] = [_FORGETTING * value for value in self._vector]
        weight, found = 1 / seconds**2, features(shape)
        for i, x in found:
            self._vector[i] += weight * x * seconds
            for j, y in found:
                self._matrix[i][j] += weight * x * y

    @property
    def mean_features(self) -> list[float] | None:
        """The features of the steps that were added, weighted as they are; ``None`` before the first."""
        weight = self._matrix[0][0]
        return [x / weight for x in self._matrix[0]] if weight else None

    def solve(self) -> list[float]:
        """The coefficients. The most negative one is left out and the rest solved again, until none is negative."""
        matrix = [row[:] for row in self._matrix]
        scale = self._matrix[0][0]  # the sum of all weights
        for i in range(NUM_FEATURES):
            matrix[i][i] += (_SMALL_BASE if i == 0 else _SMALL_ATTENTION if i >= DECODE else _SMALL) * scale
        for i in range(2, len(EDGES) + 1):
            alike = _SMOOTH * scale * WIDTHS[i - 1] ** 2
            matrix[i][i] += alike
            matrix[i - 1][i - 1] += alike
            matrix[i][i - 1] -= alike
            matrix[i - 1][i] -= alike
        keep = list(range(NUM_FEATURES))
        found: list[float] = []
        while keep:
            found = solved([[matrix[i][j] for j in keep] for i in keep], [self._vector[i] for i in keep])
            worst = min(range(len(keep)), key=lambda at: found[at] * matrix[keep[at]][keep[at]] ** 0.5)
            if found[worst] >= 0:
                break
            del keep[worst]
        coefficients = [0.0] * NUM_FEATURES
        for at, i in enumerate(keep):
            coefficients[i] = found[at]
        return coefficients


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
