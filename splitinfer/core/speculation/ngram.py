"""Drafts without a model: the token that followed when the same tokens last occurred.

Code, summaries, edited text and answers that quote repeat themselves. The longest ending of the stream (3 tokens
down to 1) that occurred before is looked up, and the token after its latest occurrence is the draft. See "prompt lookup
decoding" (Saxena, 2023). An index of every ending makes a look-up a few dictionary reads, however long the text.
"""

from collections.abc import Sequence as Seq

LONGEST = 3  # tokens of an ending; longer ones are rarer and hardly more accurate


class NGramIndex:
    """The endings of one sequence's tokens, each with the position after its latest occurrence."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # tokens

    def guess(self, tokens: Seq[int], drafts: Seq[int] = ()) -> int | None:
        """The draft that follows ``tokens`` and ``drafts``, or ``None``. ``tokens`` may only grow from call to call.

        >>> NGramIndex().guess((5, 6, 7, 8, 5, 6)), NGramIndex().guess((5, 6, 7, 8, 5, 6), (7,))
        (7, 8)
        """
        self._index(tokens)
        stream = [*tokens[-LONGEST:], *drafts]  # endings with drafts are not indexed: drafts may be dropped
        for size in range(LONGEST, 0, -1):
            after = self._after.get(tuple(stream[-size:])) if len(stream) >= size else None
            if after is not None:
                return tokens[after]
        return None

    def _index(self, tokens: Seq[int]) -> None:
        # An ending counts once a token follows it, so the stream's own end is never found.
        for end in range(max(1, self._num_indexed), len(tokens)):
            for size in range(1, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)
