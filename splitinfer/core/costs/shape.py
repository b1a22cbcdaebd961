"""What a step's cost depends on: its rows and the positions that they attend to."""

from collections.abc import Iterable
from dataclasses import dataclass

from splitinfer.core.plan import Slice


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a step: its ``rows``, and the positions to which single rows and rows of chunks attend."""

    rows: int = 0
    decode_context: int = 0
    chunk_context: int = 0

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> "Shape":
        """Return the shape of a step with these slices."""
        shape = cls()
        for part in slices:
            shape = shape.plus(part.start, len(part.token_ids))
        return shape

    def plus(self, start: int, count: int) -> "Shape":
        """Return the shape with ``count`` more rows of one sequence, from position ``start``.

        >>> Shape().plus(99, 1), Shape().plus(10, 3)
        (Shape(rows=1, decode_context=100, chunk_context=0), Shape(rows=3, decode_context=0, chunk_context=36))
        """
        if count == 1:
            return Shape(self.rows + 1, self.decode_context + start + 1, self.chunk_context)
        attended = count * start + count * (count + 1) // 2
        return Shape(self.rows + count, self.decode_context, self.chunk_context + attended)
