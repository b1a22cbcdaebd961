"""Pictures among a sequence's tokens.

A picture takes a run of positions in a prompt. The model sees a placeholder there, the same token for every picture;
the content of each row comes from the picture. In a sequence these positions hold *row ids*: numbers beyond every
vocabulary, made from the picture's content. Two runs are equal if the pictures are. So everything that compares tokens
(prefix cache, blocks on disk, conversations) also compares pictures. Stages get the placeholders, and, once with a
sequence, the places of its pictures.

Some models count positions in three dimensions: a picture of ``grid`` rows and columns takes as many positions as its
longer side, and the text continues after them.
"""

import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

FIRST_ROW_ID = 2**62
"""The least id that stands for a row of a picture."""
MAX_ROWS = 2**16  # of one picture


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture at positions [start, start + len(token_ids)) of a sequence.

    ``key``: stands for its content. ``token_ids``: the placeholders that the model sees. ``grid``: its rows and columns
    of positions if these have three dimensions; (0, 0) if each row is a position. ``is_whole``: whether its rows attend
    to each other in both directions, so that one step must compute them all.

    Raises:
        ValueError: it has no rows, or another number than its grid.
    """

    start: int
    key: bytes
    token_ids: tuple[int, ...]
    grid: tuple[int, int] = (0, 0)
    is_whole: bool = False

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if self.start < 0 or not 0 < size <= MAX_ROWS or min(self.grid) < 0:
            raise ValueError(f"a picture of {size} rows cannot be at position {self.start}")
        if self.has_grid and self.grid[0] * self.grid[1] != size:
            raise ValueError(f"a picture of {size} rows has a grid of {self.grid[0]} x {self.grid[1]}")

    @property
    def end(self) -> int:
        """One past its last position."""
        return self.start + len(self.token_ids)

    @property
    def has_grid(self) -> bool:
        """Whether its positions have three dimensions."""
        return self.grid != (0, 0)


def row_ids(key: bytes, count: int) -> tuple[int, ...]:
    """Return the ids of a picture's rows. Each has 62 bits from ``key``, so that parts of different pictures never
    match.

    >>> [number >= FIRST_ROW_ID for number in row_ids(b"key", 2)], len(set(row_ids(b"key", 9)))
    ([True, True], 9)
    """
    numbers = struct.unpack(f"<{count}Q", hashlib.shake_256(key).digest(8 * count))
    return tuple(FIRST_ROW_ID | number >> 2 for number in numbers)


def with_placeholders(tokens: Seq[int], start: int, pictures: Iterable[Picture]) -> tuple[int, ...]:
    """Return a sequence's ``tokens`` from position ``start`` on as stages get them: with placeholders for pictures.

    >>> with_placeholders((5, 2**62, 2**62 + 1, 6), 0, [Picture(1, b"", (9, 9))])
    (5, 9, 9, 6)
    """
    found, end = list(tokens), start + len(tokens)
    for picture in pictures:
        first, last = max(picture.start, start), min(picture.end, end)
        if first < last:
            found[first - start : last - start] = picture.token_ids[first - picture.start : last - picture.start]
    return tuple(found)


def grid_positions(pictures: Iterable[Picture], start: int, end: int) -> list[tuple[int, int, int]]:
    """Return the positions (time, row, column) of a sequence's tokens [start, end). ``pictures``: its pictures, in
    order.

    >>> grid_positions([Picture(1, b"", (9,) * 6, (2, 3))], 0, 9)
    [(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 2, 2), (1, 2, 3), (4, 4, 4), (5, 5, 5)]
    """
    found, less, at = list[tuple[int, int, int]](), 0, start
    for picture in pictures:
        found += [(i - less,) * 3 for i in range(at, min(picture.start, end))]
        first, width = picture.start - less, picture.grid[1]
        for i in range(max(at, picture.start), min(picture.end, end)):
            row, column = divmod(i - picture.start, width)
            found.append((first, first + row, first + column))
        at = max(at, min(picture.end, end))
        less += len(picture.token_ids) - max(picture.grid)
    return found + [(i - less,) * 3 for i in range(at, end)]


def chunk_end(pictures: Iterable[Picture], start: int, end: int) -> int:
    """Return ``end``, moved so that a chunk from ``start`` does not cut a picture that one step must compute: to the
    picture's start, or to its end if the chunk begins at that start or later.

    >>> picture = Picture(4, b"", (9,) * 8, is_whole=True)
    >>> [chunk_end([picture], *chunk) for chunk in ((0, 3), (0, 6), (4, 6), (6, 7), (2, 12), (2, 14))]
    [3, 4, 12, 12, 12, 14]
    """
    for picture in pictures:
        if picture.is_whole and picture.start < end < picture.end:
            return picture.start if start < picture.start else picture.end
    return end
