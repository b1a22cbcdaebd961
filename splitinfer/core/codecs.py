"""How hidden states are written on a link: exactly, or in fewer bytes.

    none    unchanged
    fp16    one float16 a value; a row with a value beyond its range is sent unchanged and counted
    fp8     E4M3, one float32 scale for each 128 values, which puts their largest at 448
    int8    symmetric, one float32 scale for each 128 values; the eight largest values of a row are sent apart, exactly

A link transfers the residual stream, where a few values may be thousands of times the others. One of them would take
the whole range of an 8-bit scale and leave nothing for the rest. Hence a scale for each 128 values, and in int8
separate spikes ("spike reserving", Flash Communication V2, arXiv 2508.03760). fp16 alone overflows on some models
(Gemma 3: 7e5).

A row's form depends only on its request and its position: *positions of the prompt are packed, generated ones are
exact*, in any phase. So replay after a loss, another chunking or another batch give the same tokens. But then only the
KV of prompts can be reused (``core.kv.prefix_cache``): a token that is first generated and then part of the next prompt
is sent in two forms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

NONE, FP16, FP8, INT8 = "none", "fp16", "fp8", "int8"
CODECS = (FP16, FP8, INT8)  # the codecs that pack
NAMES = (NONE, *CODECS)

GROUP = 128  # values that share a scale
SPIKES = 8  # values of a row that int8 sends apart
MOST_WIDTH = 1 << 16  # values of a row: a spike's index has 16 bits

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1, "uint16": 2}
_MARGIN = 1.1  # factor by which packing must be faster
RowRun = tuple[int, int]  # rows [start, end)


@dataclass(frozen=True, slots=True)
class Column:
    """One array of packed rows: ``width`` numbers of ``dtype`` for each row."""

    dtype: str
    width: int

    @property
    def bytes_per_row(self) -> int:
        return _SIZES[self.dtype] * self.width


def columns(codec: str, width: int) -> tuple[Column, ...]:
    """Return the arrays that rows of ``width`` values are packed into, in their order on the wire.

    Raises:
        ValueError: ``codec`` does not pack, or the rows are too wide for it.
    """
    if not 0 < width <= MOST_WIDTH:
        raise ValueError(f"rows of {width:,} values cannot be packed; at most {MOST_WIDTH:,} can")
    scales = Column("float32", -(-width // GROUP))
    if codec == FP16:
        return (Column("float16", width),)
    if codec == FP8:
        return (Column("uint8", width), scales)
    if codec == INT8:
        spikes = min(SPIKES, width)
        return (Column("int8", width), scales, Column("float32", spikes), Column("uint16", spikes))
    raise ValueError(f"codec {codec!r:.20} is unknown; known: {', '.join(CODECS)}")


def bytes_per_row(codec: str, width: int, dtype: str) -> int:
    """Return the bytes that a row of ``width`` values takes on the wire. ``dtype``: of the unpacked values."""
    if codec == NONE:
        return Column(dtype, width).bytes_per_row
    return sum(column.bytes_per_row for column in columns(codec, width))


def packs(codec: str, width: int, dtype: str) -> bool:
    """Return whether a codec makes rows smaller at all: fp16 does nothing for a model that computes in 16 bits."""
    return codec != NONE and bytes_per_row(codec, width, dtype) < bytes_per_row(NONE, width, dtype)


def is_faster(plain: int, packed: int, bytes_per_second: float, seconds: float) -> bool:
    """Return whether packing is clearly faster. ``plain``, ``packed``: bytes of the same rows; ``seconds``: the time of
    packing and unpacking them. The margin is needed because time on the link may overlap with computing, but packing
    does not.

    >>> is_faster(4_000_000, 1_000_000, 1e9, 0.001), is_faster(4_000_000, 1_000_000, 1e10, 0.001)
    (True, False)
    """
    return plain / bytes_per_second > _MARGIN * (packed / bytes_per_second + seconds)


@dataclass(frozen=True, slots=True)
class Packing:
    """Which rows of a step are packed, and how: ``runs``, ascending and apart.

    Raises:
        ValueError: the codec is unknown, or runs are empty, overlap or are out of order.
    """

    codec: str
    runs: tuple[RowRun, ...]

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r:.20} is unknown; known: {', '.join(CODECS)}")
        ascend = all(before[1] < after[0] for before, after in pairwise(self.runs))
        if not self.runs or self.runs[0][0] < 0 or not ascend or not all(start < end for start, end in self.runs):
            raise ValueError(f"rows {self.runs!r:.80} are not runs that follow each other")

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return sum(end - start for start, end in self.runs)

    @property
    def end(self) -> int:
        """One past the last packed row."""
        return self.runs[-1][1]

    def pieces(self, num_rows: int) -> tuple[tuple[bool, int], ...]:
        """Return all rows of the step in order, as runs: whether they are packed, and how many there are.

        >>> Packing("int8", ((2, 5),)).pieces(6)
        ((False, 2), (True, 3), (False, 1))
        """
        found, at = list[tuple[bool, int]](), 0
        for start, end in self.runs:
            found += [(False, start - at), (True, end - start)]
            at = end
        found.append((False, num_rows - at))
        return tuple(piece for piece in found if piece[1])


def runs_of(rows: Iterable[int]) -> tuple[RowRun, ...]:
    """Return the runs that ascending numbers form.

    >>> runs_of([0, 1, 2, 5, 6])
    ((0, 3), (5, 7))
    """
    found = list[RowRun]()
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)
