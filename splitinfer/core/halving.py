"""Decides which rows of a parameter each of two ranks keeps, and which counts of a module are halved with them.

A rank computes half of the columns of a module's last matrices. What it needs of a parameter is known for each axis, as
a flag for each row: whether the rank's half depends on it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from splitinfer.core.codecs import RowRun, runs_of
from splitinfer.core.layout import RANKS

Number = tuple[str, str]  # a module's path and the name of its attribute

_MOST_CHANGES = 3  # of the likely choice of counts
_MOST_TRIED = 400
_LIKELY = ("heads", "head", "groups")
"""The ends of names of counts that are halved with rows."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows of a parameter that each rank keeps. ``axis``: negative, counted from the last. ``share``: how many of
    its numbers that are."""

    axis: int
    runs: tuple[tuple[RowRun, ...], ...]
    share: float


def half_of_columns(count: int, rank: int) -> RowRun:
    """Return the columns [start, end) of a rank.

    Raises:
        ValueError: they cannot be halved.
    """
    if count % RANKS:
        raise ValueError(f"{count} columns cannot be divided by {RANKS} ranks")
    return rank * count // RANKS, (rank + 1) * count // RANKS


def kept_rows(*reached: Sequence[Sequence[bool]]) -> Kept | None:
    """Return what each rank keeps of a parameter, or ``None`` if both keep all of it.

    ``reached``: by rank and axis, whether the rank's half depends on each row. Of several axes that can be divided,
    the one that leaves least is. Rows that nothing depends on are kept by both.
    """
    found = list[Kept]()
    for axis, flags in enumerate(zip(*reached, strict=True)):
        if not all(any(own) for own in flags):  # a choice shows no dependence, so it is whole
            continue
        unused = [not any(row) for row in zip(*flags, strict=True)]
        rows = [[i for i, is_own in enumerate(own) if is_own or unused[i]] for own in flags]
        if len({len(own) for own in rows}) == 1 and len(rows[0]) < len(unused):
            runs = tuple(map(runs_of, rows))
            found.append(Kept(axis - len(reached[0]), runs, len(rows[0]) / len(unused)))
    return min(found, key=lambda kept: kept.share, default=None)


def counts_to_try(numbers: Mapping[Number, int], sizes: Iterable[int]) -> Iterator[tuple[Number, ...]]:
    """Yield the choices of attributes to halve, the likely ones first: counts of heads, then those with attributes that
    have the size of what is halved, then both with a few changes.

    Args:
        numbers: a module's even attributes.
        sizes: numbers of rows that are halved.
    """
    heads = {each for each in numbers if each[1].endswith(_LIKELY)}
    sized = heads | {each for each, value in numbers.items() if value in set(sizes) and "head" not in each[1]}
    changes = chain.from_iterable(combinations(numbers, count) for count in range(_MOST_CHANGES + 1))
    tried = set[frozenset[Number]]()
    for changed in changes:
        for likely in (heads, sized):
            chosen = frozenset(likely.symmetric_difference(changed))
            if chosen not in tried and len(tried) < _MOST_TRIED:
                tried.add(chosen)
                yield tuple(sorted(chosen))
