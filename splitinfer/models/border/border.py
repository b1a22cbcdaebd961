"""Packs the arrays that cross a border between layers into one array of rows (``models.cut.structure`` finds them).

Several arrays are packed side by side, as float32 if their dtypes differ. Integers keep their bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import mlx.core as mx

from splitinfer.models.library.layers import Path


@dataclass(frozen=True, slots=True)
class TokenRow:
    """An array with one row per token.

    ``path``: its place in a layer's arguments, or (cache, part). ``since``: the length in tokens from which on a
    sequence has it; a shorter sequence has ``None`` in its place.
    """

    path: Path
    axis: int
    shape: tuple[int, ...]  # without the axis of the rows
    dtype: mx.Dtype
    since: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it holds integers."""
        return not mx.issubdtype(self.dtype, mx.floating)

    def width(self, dtype: mx.Dtype) -> int:
        """Return how many numbers of ``dtype`` a token takes. Integers are packed as their bits in 4 or 8 bytes."""
        return prod(self.shape) * (_whole(self.dtype).size // dtype.size if self.is_whole else 1)


def _whole(dtype: mx.Dtype) -> mx.Dtype:
    """Return the integer dtype that crosses the link in place of ``dtype``."""
    return mx.int64 if dtype.size == 8 else mx.int32


@dataclass(frozen=True)  # without slots: what each step asks is computed once
class Border:
    """The arrays that cross a cut in front of ``layer``: its arguments (``rows``), new keys and values of caches that
    both sides need (``updates``), and by layer the arguments of earlier layers that run again after it
    (``replicas``)."""

    layer: int
    rows: tuple[TokenRow, ...]
    updates: tuple[TokenRow, ...]
    replicas: Mapping[int, tuple[TokenRow, ...]] = field(default_factory=dict)

    @property
    def given(self) -> dict[int, tuple[TokenRow, ...]]:
        """By layer: the rows that cross for it."""
        return {**self.replicas, self.layer: self.rows}

    @property
    def shared(self) -> tuple[int, ...]:
        """The places of the caches whose updates cross."""
        return tuple(dict.fromkeys(row.path[0] for row in self.updates))

    @cached_property
    def _all(self) -> tuple[TokenRow, ...]:
        return (*(row for rows in self.given.values() for row in rows), *self.updates)

    @cached_property
    def is_plain(self) -> bool:
        """Whether one [1, n, d] hidden state crosses and nothing else."""
        alone = len(self._all) == 1 and not self.replicas and not self.is_exact
        return alone and self.rows[0].axis == 1 and len(self.rows[0].shape) == 2

    @cached_property
    def is_exact(self) -> bool:
        """Whether integers cross, whose bits no codec may change."""
        return any(row.is_whole for row in self._all)

    @cached_property
    def width(self) -> int:
        """How many numbers cross per token."""
        return sum(row.width(self.dtype) for row in self._all)

    @cached_property
    def dtype(self) -> mx.Dtype:
        """The dtype of the packed array: float32 if several are packed, so that nothing is lost."""
        kinds = {row.dtype for row in self._all if not row.is_whole}
        return kinds.pop() if len(kinds) == 1 else mx.float32

    def pack(self, arrays: Sequence[mx.array | None]) -> mx.array:
        """Return ``arrays``, everything that crosses, packed as [1, n, width]."""
        first = arrays[0]
        assert first is not None
        if self.is_plain:
            return first
        n = first.shape[self._all[0].axis]
        return mx.concatenate([self._columns(row, a, n) for row, a in zip(self._all, arrays, strict=True)], axis=1)[
            None
        ]

    def _columns(self, row: TokenRow, array: mx.array | None, n: int) -> mx.array:
        """Return one array as [n, width], or zeros if the sequence has no such array yet."""
        if array is None:
            return mx.zeros((n, row.width(self.dtype)), self.dtype)
        flat = mx.moveaxis(array, row.axis, 0).reshape(n, -1)
        return flat.astype(_whole(row.dtype)).view(self.dtype) if row.is_whole else flat.astype(self.dtype)

    def unpack(self, packed: mx.array, length: int) -> list[mx.array | None]:
        """Return the arrays that ``pack`` was given. ``length``: the sequence's tokens after this step."""
        if self.is_plain:
            return [packed]
        parts, at = list[mx.array | None](), 0
        for row in self._all:
            columns = packed[0, :, at : (at := at + row.width(self.dtype))]
            numbers = columns.view(_whole(row.dtype)) if row.is_whole else columns
            array = mx.moveaxis(numbers.reshape(-1, *row.shape), 0, row.axis).astype(row.dtype)
            parts.append(array if length >= row.since else None)
        return parts

    def made_up(self, n: int, seed: int) -> mx.array:
        """Return [n, width] random rows for a trial. Integers are zero, which is a valid index everywhere."""
        rows = mx.random.normal((n, self.width), key=mx.random.key(seed)).astype(self.dtype)
        if not self.is_exact:
            return rows
        kept = [mx.full((row.width(self.dtype),), not row.is_whole) for row in self._all]
        return mx.where(mx.concatenate(kept), rows, 0)
