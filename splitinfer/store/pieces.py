"""Items in pieces: how they are cut, which are missing, and how many may be under way.

A piece is what one message brings and what one checksum is of. Pieces do not cross items, so an item is complete when
its pieces are. Two megabytes: a gigabit link is busy with one for 17 ms, which is as long as a token beside it may have
to wait, and a message about it has less than a thousandth of its bytes.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from splitinfer.store.manifest import Item

PIECE = 2 * 2**20  # bytes
WINDOW = 32 * 2**20  # bytes that may be asked for and not yet here: 10 Gb/s for 25 ms, a busy machine's hiccup
MOST_ASKED = 512  # pieces that may be; a model may have thousands of small tensors


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A piece of an item: ``item`` its number, ``at`` the piece's number in it, ``nbytes`` its size."""

    item: int
    at: int
    nbytes: int

    @property
    def begin(self) -> int:
        """Its first byte in the item."""
        return self.at * PIECE


def num_pieces(nbytes: int) -> int:
    """The number of pieces of an item; an empty one has none.

    >>> [num_pieces(n) for n in (0, 1, PIECE, PIECE + 1)]
    [0, 1, 1, 2]
    """
    return -(-nbytes // PIECE)


def pieces_of(number: int, item: Item) -> Iterator[Piece]:
    """An item's pieces in order."""
    for at in range(num_pieces(item.nbytes)):
        yield Piece(number, at, min(PIECE, item.nbytes - at * PIECE))


def piece_at(items: Sequence[Item], item: int, at: int) -> Piece | None:
    """The piece that a peer asks for; ``None`` if there is no such piece."""
    if not 0 <= item < len(items) or not 0 <= at < num_pieces(items[item].nbytes):
        return None
    return Piece(item, at, min(PIECE, items[item].nbytes - at * PIECE))


def check_of(data: bytes | memoryview) -> int:
    """A piece's checksum, CRC-32: against accidents on the way, in memory and on the disk.

    It comes from whoever sends the bytes, so no digest would be worth more against a sender that lies: for that,
    digests come from somebody else (``store.hearsay``). SHA-256 at both ends would take nearly as long as encryption.
    """
    return zlib.crc32(data)


class Asked:
    """The pieces under way, in the order in which they were asked for, which is that in which they come.

    ``window``: bytes that may be under way; one piece always may. ``at_once``: as soon as there is room for a piece,
    ask for it; otherwise only when a quarter of the window is free, with a quarter of the messages or less.
    """

    def __init__(self, pieces: Iterable[Piece], window: int = WINDOW, *, at_once: bool = True) -> None:
        self._coming = iter(pieces)
        self._next = next(self._coming, None)
        self._under_way: deque[Piece] = deque()
        self._bytes, self._window = 0, window
        self._most_bytes, self._most_asked = (window, MOST_ASKED) if at_once else (3 * window // 4, 3 * MOST_ASKED // 4)

    def to_ask(self) -> list[Piece]:
        """The pieces to ask for now."""
        asking: list[Piece] = []
        if self._bytes > self._most_bytes or len(self._under_way) > self._most_asked:
            return asking
        while self._next is not None and self._has_room_for(self._next):
            asking.append(self._next)
            self._under_way.append(self._next)
            self._bytes += self._next.nbytes
            self._next = next(self._coming, None)
        return asking

    def _has_room_for(self, piece: Piece) -> bool:
        if not self._under_way:
            return True
        return self._bytes + piece.nbytes <= self._window and len(self._under_way) < MOST_ASKED

    def came(self, item: int, at: int, nbytes: int) -> Piece | None:
        """The piece that came; ``None`` if it is not the one that is due, or has another size."""
        due = self._under_way[0] if self._under_way else None
        if due is None or (due.item, due.at, due.nbytes) != (item, at, nbytes):
            return None
        self._under_way.popleft()
        self._bytes -= due.nbytes
        return due

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way, and nothing is left to ask for."""
        return not self._under_way and self._next is None
