"""Drafts without a model: the token that followed when the same tokens last occurred.

Code, summaries, edited text and answers that quote repeat themselves. The longest ending of the stream (8 tokens, or 3
down to 1) that occurred before is looked up, and the token after its latest occurrence is the draft. See "prompt lookup
decoding" (Saxena, 2023). With an index of every ending, a look-up is a few dictionary reads, however long the text. A
long prompt is indexed in parts, because other streams wait meanwhile; until it is complete, guesses use the indexed
part.

The number of tokens that agree before the two places shows how much a guess is worth, so a look-up counts them, up to
16. As the text goes on, each token shows whether the guess for it would have been right, used or not.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

SIZES = (8, 3, 2, 1)  # tokens of the endings in the index: a long one tells a quotation from a common phrase
MOST = 16  # tokens that are compared
AT_ONCE = 1024  # tokens that are indexed with one token of the text: 1.5 ms
_INDEXED = 1 << 16  # last tokens of a prompt that are indexed; each takes 0.4 KB


@dataclass(frozen=True, slots=True)
class Guess:
    """A guessed token. ``length``: how many tokens before its place agree with the stream's last ones, at most MOST."""

    token_id: int
    length: int


class NGramIndex:
    """The endings of one sequence's tokens, each with the position after its latest occurrence.

    ``shown``: called for each new token that had a guess, with the guess and whether it was right; None: not wanted.
    """

    def __init__(self, shown: Callable[[Guess, bool], None] | None = None) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # tokens
        self._length = 0  # of the text at the last call of ``follow``
        self._shown = shown

    def look_up(self, tokens: Seq[int], drafts: Seq[int] = ()) -> Guess | None:
        """Return the guess that follows ``tokens`` and ``drafts``. Return None if there is none. ``tokens`` may only
        grow from call to call.

        >>> NGramIndex().look_up((5, 6, 7, 8, 5, 6)), NGramIndex().look_up((5, 6, 7, 8, 5, 6), (7,))
        (Guess(token_id=7, length=2), Guess(token_id=8, length=3))
        """
        self.follow(tokens)
        # Endings with drafts are not indexed: drafts may be dropped.
        return self._found(tokens, [*tokens[-MOST:], *drafts][-MOST:])

    def follow(self, tokens: Seq[int]) -> None:
        """Index up to ``AT_ONCE`` tokens that have come since the last call."""
        if self._length != len(tokens):
            self._index(tokens)

    def catch_up(self, tokens: Seq[int]) -> bool:
        """Index the next ``AT_ONCE`` tokens if more than that are missing. Return whether they were."""
        if self._first(tokens) + AT_ONCE >= len(tokens):
            return False  # ``follow`` does it
        self._index(tokens)
        return True

    def _first(self, tokens: Seq[int]) -> int:
        """Return the first position whose ending is not indexed."""
        return max(1, self._num_indexed, len(tokens) - _INDEXED if not self._length else 0)

    def _index(self, tokens: Seq[int]) -> None:
        # An ending counts once a token follows it, so the stream's own end is never found.
        first = self._first(tokens)
        last, self._length = min(len(tokens), first + AT_ONCE), len(tokens)
        for end in range(first, last):
            if self._shown is not None and (guess := self._found(tokens, tokens[max(0, end - MOST) : end])) is not None:
                self._shown(guess, guess.token_id == tokens[end])
            for size in SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(first, last)

    def _found(self, tokens: Seq[int], last: Seq[int]) -> Guess | None:
        """Return the guess for the token after ``last``, the stream's last tokens."""
        for size in SIZES:
            after = self._after.get(tuple(last[-size:])) if size <= len(last) else None
            if after is not None:
                most = min(len(last), after)
                while size < most and tokens[after - size - 1] == last[-size - 1]:
                    size += 1
                return Guess(tokens[after], size)
        return None
