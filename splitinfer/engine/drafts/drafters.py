"""Who guesses the next tokens: one small interface, on the coordinator, on the engine's thread.

    prepare     read its prompt, while nobody needs the coordinator
    drafts      guess after guess that follow a sequence's stream: its tokens, and the drafts under way
    forget      it has ended

A drafter may be wrong as often as it likes: the last stage takes drafts only where they are what the model itself
gives. It is told the whole stream every time, and follows rollbacks by comparing it with what it had.
"""

from collections.abc import Iterator
from typing import Protocol

from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.ngram import NGramIndex
from splitinfer.core.speculation.speculation import Draft

NGRAM = "ngram"


class Drafter(Protocol):
    """What the engine needs of one. Guesses are pulled one by one, so that a result can end them in between."""

    @property
    def name(self) -> str:
        """What it is called in figures."""
        ...

    def prepare(self, seq: Sequence) -> bool:
        """Do a part of what has to be done before a sequence's first guess; whether there was anything to do."""
        ...

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        """Up to ``count`` guesses that follow ``seq.stream``, which does not change meanwhile; fewer where it has no
        more."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        ...


class NGramDrafter:
    """Looks up what followed before (``core.speculation.ngram``). Costs next to nothing."""

    name = NGRAM

    def __init__(self) -> None:
        self._indices: dict[int, NGramIndex] = {}

    def prepare(self, seq: Sequence) -> bool:
        """Reading on costs nothing that could be done earlier."""
        return False

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        """Guesses until an ending is new."""
        index = self._indices.setdefault(seq.seq_id, NGramIndex())
        ahead = [*seq.ahead, *seq.drafted]
        for _ in range(count):
            token_id = index.guess(seq.tokens, ahead)
            if token_id is None:
                return
            ahead.append(token_id)
            yield Draft(token_id)

    def forget(self, seq_id: int) -> None:
        """Its index goes."""
        self._indices.pop(seq_id, None)
