"""Which steps of a span to time in the seconds that there are. Pure.

Numbers of rows come in the order of their importance: one row is what one reader waits for, eight show what more rows
cost, chunks what prompts cost; those between them bend the line a little. A number of rows is timed if its step, as
often as it is timed at least, is expected to fit into what is left of the span's seconds. Two are timed in any case,
for costs are a line at least. What is left then goes to repeats.

    expected    what the next larger number of rows took; beyond the largest, in proportion to the rows, which is an
                upper bound: rows share the reading of weights

On a device that is so slow that no chunk is timed (a processor that computes quantised products, some milliseconds a
row), chunks are left to the line through the largest numbers of rows, where time is proportional to rows anyway.
"""

from collections.abc import Collection, Mapping

CHUNKS = (128, 512)  # rows of one sequence
ORDER = (1, 8, 128, 32, 512, 16, 2, 4)  # the most important number of rows first
_IN_ANY_CASE = 2  # numbers of rows
_FEW = 2  # rows, in place of eight where these take too long
_LONG = 0.25  # seconds of a step that is not repeated
_MOST = 6  # times that a step is timed, the first included

Seconds = Mapping[int, float]  # of a step, by rows


def expected(known: Seconds, rows: int) -> float:
    """Seconds that a step of so many rows may take, by those that were timed: 0 if none was."""
    larger = [count for count in known if count >= rows]
    if larger:
        return known[min(larger)]
    most = max(known, default=rows)
    return known.get(most, 0.0) * rows / most


def fewest(seconds: float) -> int:
    """How often a step is timed at least that takes so long: the first time does not count, but for a long one."""
    return 1 if seconds > _LONG else 2


def next_rows(known: Seconds, left: float, allowed: Collection[int] = ORDER) -> int | None:
    """The number of rows to time next; ``None``: no other is worth it.

    Args:
        known: what was timed on this span.
        left: seconds of the span that are left.
        allowed: the numbers of rows that were timed on the spans before it; others would tell nothing.
    """
    open_ones = [rows for rows in ORDER if rows in allowed and rows not in known]
    for rows in open_ones:
        seconds = expected(known, rows)
        if seconds * fewest(seconds) <= left:
            return rows
    if len(known) >= _IN_ANY_CASE or not open_ones:
        return None
    return min(open_ones, key=lambda rows: (rows != _FEW, rows)) if known else open_ones[0]


def next_repeat(known: Seconds, counts: Mapping[int, int], left: float) -> int | None:
    """The number of rows to time once more: one that was timed least, the most important first; ``None``: there is no
    time for any, or all were timed often enough."""
    again = [r for r in ORDER if r in known and counts[r] < _MOST and known[r] <= min(left, _LONG)]
    return min(again, key=lambda rows: counts[rows], default=None)
