"""Which of two drafters drafts at a place: n-grams, which cost nothing, or a model.

The better one is the one that has been right at such places. What tells places apart is how many tokens agree before an
n-gram's guess: in prose one or two, and the guess is seldom right; where a text quotes or repeats itself many, and it
nearly always is. So for each class of that length two shares are kept, of guesses and of the model's drafts that were
right, for each sequence, with those of all sequences as the prior.

A guess is judged at every token, used or not, from the prompt's beginning on, because a look-up costs nothing. The
model's drafts are judged where they were made. Where both are as good, or nearly, the guess is taken: it saves a step
of the model.

The guesses stand at a block's beginning; behind the first place that is the model's, the block is the model's, whose
drafts can then be computed in one go.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.ngram import NGramIndex

_BOUNDS = (1, 2, 3, 4, 8, 16)  # the least lengths of the classes
_USUAL_GUESS = 0.3  # share of guesses that are right, before any was judged
_MAX_SEQUENCES = 256  # whose n-grams are kept
_FREE = 0.05  # share that a guess may be worse, for what a draft of the model costs


def _class_of(length: int) -> int:
    return sum(length >= bound for bound in _BOUNDS)


class FlightChooser:
    """Chooses for one sequence, and learns from its tokens. ``guesses``, ``drafts``: the shares of guesses and of the
    model's drafts that were right, by class."""

    def __init__(self, guesses: Seq[Acceptance], drafts: Seq[Acceptance]) -> None:
        self._guesses, self._drafts = guesses, drafts
        self._index = NGramIndex(lambda guess, right: guesses[_class_of(guess.length)].add(1, int(right)))
        # By position: a draft, and if it is the model's the tokens that agree before a guess.
        self._drafted: dict[int, tuple[int, int | None]] = {}

    def takes_guess(self, length: int) -> bool:
        """Return whether a guess behind so many tokens that agree is to be preferred to a draft of the model."""
        i = _class_of(length)
        return length > 0 and self._guesses[i].share >= self._drafts[i].share - _FREE

    def guesses(self, tokens: Seq[int], ahead: Seq[int], count: int) -> list[int]:
        """Return up to ``count`` guesses behind ``tokens`` and the drafts ``ahead``; they end where the model is
        better.

        ``tokens`` may only grow from call to call; ``ahead`` may be anything.
        """
        self._judge(tokens)
        found: list[int] = []
        while len(found) < count:
            guess = self._index.look_up(tokens, [*ahead, *found])
            if guess is None or not self.takes_guess(guess.length):
                break
            found.append(guess.token_id)
        return found

    def catch_up(self, tokens: Seq[int]) -> bool:
        """As ``NGramIndex.catch_up``."""
        return self._index.catch_up(tokens)

    def drafted(self, tokens: Seq[int], ahead: Seq[int], token_id: int, *, by_model: bool) -> None:
        """Take note of a draft behind ``tokens`` and ``ahead``."""
        guess = self._index.look_up(tokens, ahead) if by_model else None
        length = None if not by_model else 0 if guess is None else guess.length
        self._drafted[len(tokens) + len(ahead)] = token_id, length

    def _judge(self, tokens: Seq[int]) -> None:
        for position in [position for position in sorted(self._drafted) if position < len(tokens)]:
            token_id, length = self._drafted.pop(position)
            if length is not None:
                self._drafts[_class_of(length)].add(1, int(token_id == tokens[position]))
            if token_id != tokens[position]:
                self._drafted.clear()  # those behind it followed another text
                break
        self._index.follow(tokens)


class Choosers:
    """One ``FlightChooser`` for each sequence, which share what they learn."""

    def __init__(self) -> None:
        count, drafts = len(_BOUNDS) + 1, Acceptance()
        self._guesses = [Acceptance(usual=_USUAL_GUESS) for _ in range(count)]
        self._drafts = [Acceptance(drafts) for _ in range(count)]
        self._each: OrderedDict[int, FlightChooser] = OrderedDict()

    def of(self, seq_id: int) -> FlightChooser:
        """Return a sequence's."""
        if seq_id not in self._each:
            shares = ([Acceptance(like) for like in every] for every in (self._guesses, self._drafts))
            self._each[seq_id] = FlightChooser(*shares)
            while len(self._each) > _MAX_SEQUENCES:
                self._each.popitem(last=False)
        return self._each[seq_id]

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's."""
        self._each.pop(seq_id, None)

    def chosen(self, seq_id: int, tokens: Seq[int], drafts: Seq[int]) -> list[int]:
        """Of a model's ``drafts`` behind all ``tokens``, and as many guesses, those to use. All of the model's are
        judged, used or not: they are made in any case."""
        chooser, own = self.of(seq_id), list(drafts)
        guesses = chooser.guesses(tokens, [], len(own))
        for i, token_id in enumerate(own):
            chooser.drafted(tokens, own[:i], token_id, by_model=True)
        return own if own[: len(guesses)] == guesses else guesses
