"""Drafts without a model: what followed the last time the same tokens stood there.

Code, summaries, edited text and answers that quote repeat themselves. The longest ending of the stream (3 tokens
down to 1) that occurred before is looked up, and what followed its latest occurrence is the guess. See "prompt lookup
decoding" (Saxena, 2023). An index of every ending makes a look-up a few dictionary reads, however long the text.
"""

from collections.abc import Sequence as Seq

LONGEST = 3  # tokens of an ending; longer ones are rarer, and hardly surer


class NGramIndex:
    """The endings of one sequence's tokens, each with the position after its latest occurrence."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0  # tokens that are in the index

    def guess(self, tokens: Seq[int], drafts: Seq[int] = ()) -> int | None:
        """What may follow ``tokens`` and ``drafts``. ``tokens`` only grow from call to call.

        >>> NGramIndex().guess((5, 6, 7, 8, 5, 6)), NGramIndex().guess((5, 6, 7, 8, 5, 6), (7,))
        (7, 8)
        """
        self._read_on(tokens)
        stream = [*tokens[-LONGEST:], *drafts]  # of the drafts no ending is kept: they may go again
        for size in range(LONGEST, 0, -1):
            after = self._after.get(tuple(stream[-size:])) if len(stream) >= size else None
            if after is not None:
                return tokens[after]
        return None

    def _read_on(self, tokens: Seq[int]) -> None:
        # An ending counts once a token follows it, so the stream's own end is never found.
        for end in range(max(1, self._read), len(tokens)):
            for size in range(1, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)
