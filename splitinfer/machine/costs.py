"""Measured or described costs of a step: seconds by its rows, and for the positions that these attend to.

Between two measured numbers of rows the seconds lie on a line, and beyond the last one that line goes on. The scheduler
learns its own costs from running steps (``core.costs``); these do not change.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Self

import pydantic
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from splitinfer.core.costs.shape import Shape

# -- values that are checked when they are made ------------------------------------------------------------------------

NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
Bytes = Annotated[int, pydantic.Field(ge=0)]


class Numbers:
    """A base class for pydantic dataclasses that are saved as numbers."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the object as plain numbers and text, for ``from_dict``."""
        found: dict[str, Any] = pydantic.TypeAdapter(type(self)).dump_python(self, mode="json")
        return found

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """Return the object whose ``as_dict`` is ``numbers``.

        Raises:
            ValueError: a number is missing, unknown or out of its range.
        """
        value: Self = pydantic.TypeAdapter(cls).validate_python(numbers)
        return value


def sentence(error: Exception) -> str:
    """Return the first mistake in some numbers and its place, in one line."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error).partition("\n")[0]
    first = error.errors()[0]
    text = first["msg"].removeprefix("Value error, ")
    text = "there is no such key" if first["type"] == "extra_forbidden" else text
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), text[:1].lower() + text[1:])))


# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Costs:
    """The costs of a step in seconds.

    Args:
        points: pairs of a rising number of rows and the seconds of such a step, which never fall; empty: no cost.
        decode: seconds for each position that a single row attends to.
        chunk: seconds for each position that a row of a chunk attends to.

    Raises:
        ValueError: a number is out of its range.
    """

    points: tuple[tuple[Count, NotNegative], ...] = ()
    decode: NotNegative = 0.0
    chunk: NotNegative = 0.0

    def __post_init__(self) -> None:
        if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.points)):
            raise ValueError("more rows than one cannot take less time than one")

    @classmethod
    def through(cls, seconds: Mapping[int, float], decode: float = 0.0, chunk: float = 0.0) -> "Costs":
        """Return costs that pass through these points, given as seconds by rows."""
        return cls(tuple(sorted(seconds.items())), decode, chunk)

    @classmethod
    def line(cls, base: float, per_row: float) -> "Costs":
        """Return costs of ``base`` seconds for each step and ``per_row`` seconds for each row."""
        return cls(((1, base + per_row), (2, base + 2 * per_row)))

    def at(self, shape: Shape) -> float:
        """Return the seconds of a step of this shape."""
        return self.rows(shape.rows) + self.decode * shape.decode_context + self.chunk * shape.chunk_context

    def rows(self, rows: int) -> float:
        """Return the seconds of a step of ``rows`` rows that attend to nothing."""
        points = self.points
        if len(points) < 2:
            return points[0][1] if points else 0.0
        at = next((i for i in range(1, len(points)) if rows <= points[i][0]), len(points) - 1)
        (a, low), (b, high) = points[at - 1 : at + 1]
        return max(0.0, low + (high - low) * (rows - a) / (b - a))

    def scaled(self, factor: float) -> "Costs":
        """Return these costs times ``factor``."""
        points = tuple((rows, factor * seconds) for rows, seconds in self.points)
        return Costs(points, factor * self.decode, factor * self.chunk)

    def slowest(self, other: "Costs") -> "Costs":
        """Return the costs of both at the same time: the larger for each number of rows."""
        return self._each(other, max)

    def quickest(self, other: "Costs") -> "Costs":
        """Return the smaller costs of both for each number of rows."""
        return self._each(other, min)

    def _each(self, other: "Costs", choose: Callable[[float, float], float]) -> "Costs":
        rows = sorted({each for each, _ in (*self.points, *other.points)})
        points = tuple((n, choose(self.rows(n), other.rows(n))) for n in rows)
        return Costs(points, choose(self.decode, other.decode), choose(self.chunk, other.chunk))

    def plus(self, other: "Costs", most_rows: int | None = None) -> "Costs":
        """Return the costs of both, one after the other. ``most_rows``: ``other`` charges no rows beyond these."""
        most, rows = most_rows or 2**62, {each for each, _ in (*self.points, *other.points)}
        rows |= set() if most_rows is None else {most, most + 1}
        points = tuple((n, self.rows(n) + other.rows(min(n, most))) for n in sorted(rows))
        return Costs(points, self.decode + other.decode, self.chunk + other.chunk)
