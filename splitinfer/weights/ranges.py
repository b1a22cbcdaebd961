"""Computes with ranges of bytes: which are here, which are missing, and the pieces to ask for.

A span is half-open. *Merged* spans rise, and neither touch nor overlap. One message brings one piece, and one checksum
covers it. A piece has 2 MiB: a gigabit link needs 17 ms for it, which is the longest delay of a token beside it, and a
message about it has less than a thousandth of its bytes.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

Span = tuple[int, int]

PIECE = 2 * 2**20  # bytes
WINDOW = 32 * 2**20  # bytes on the way at a time: 10 Gb/s for 25 ms, a busy machine's hiccup


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same bytes as merged spans.

    >>> merged([(5, 9), (0, 2), (2, 3), (7, 8), (4, 4)])
    ((0, 3), (5, 9))
    """
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


def is_in(span: Span, here: Sequence[Span]) -> bool:
    """Return whether a span lies within one of the merged spans ``here``; an empty one always does."""
    begin, end = span
    at = bisect_right(here, begin, key=lambda each: each[0]) - 1
    return begin == end or (at >= 0 and end <= here[at][1])


def missing(wanted: Iterable[Span], here: Iterable[Span]) -> tuple[Span, ...]:
    """Return the wanted bytes that are not here, merged.

    >>> missing([(0, 10), (20, 30)], [(3, 5), (9, 22)])
    ((0, 3), (5, 9), (22, 30))
    """
    left: list[Span] = []
    known = merged(here)
    for begin, end in merged(wanted):
        for have_begin, have_end in known[max(0, bisect_right(known, begin, key=lambda each: each[0]) - 1) :]:
            if have_begin >= end:
                break
            if have_begin > begin:
                left.append((begin, have_begin))
            begin = max(begin, have_end)
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def size(spans: Iterable[Span]) -> int:
    """Return the total bytes of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def pieces(spans: Iterable[Span], most: int = PIECE) -> Iterator[Span]:
    """Yield the spans cut into pieces of at most ``most`` bytes.

    >>> list(pieces([(0, 5), (9, 10)], 2))
    [(0, 2), (2, 4), (4, 5), (9, 10)]
    """
    for begin, end in spans:
        for at in range(begin, end, most):
            yield at, min(at + most, end)


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32 of a piece. The sender computes it, and it finds accidents. A digest would find no more,
    because the link authenticates the sender, and SHA-256 at both ends takes nearly as long as encryption."""
    return zlib.crc32(data)


# -- how fast a sender sends -------------------------------------------------------------------------------------------

BESIDE_SERVING = 30e6  # bytes a second: a quarter of a gigabit link


class Pace:
    """Computes the wait before each piece, so that on average at most ``rate`` bytes a second are sent.

    Idle time does not allow more bytes later. All times are in seconds.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait(self, now: float, nbytes: int, rate: float | None) -> float:
        """Return the seconds to wait before sending ``nbytes`` more. ``rate``: bytes a second; None: unlimited.

        >>> pace = Pace()
        >>> [pace.wait(now, 10, 100.0) for now in (5.0, 5.0, 5.0, 9.0)]
        [0.0, 0.1, 0.2, 0.0]
        """
        if rate is None:
            self._free_at = now
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + nbytes / rate
        return round(begin - now, 9)
