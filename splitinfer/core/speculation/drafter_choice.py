"""Chooses at each place between two drafters: n-grams, which cost nothing, and a model.

The one that has been right more often at such places drafts. Places are classed by how many tokens agree before an
n-gram's guess. In prose these are one or two, and the guess is seldom right; if a text quotes or repeats itself they
are many, and the guess is nearly always right. For each class and each sequence two shares are kept: of right guesses,
and of the model's right drafts. Their priors are the shares of all sequences.

A guess is judged at every token, used or not, from the prompt's beginning, because a look-up costs nothing. The model's
drafts are judged where they were made. If both are about equally good, the guess is taken: it saves a step of the
model.

The guesses stand at a block's beginning. From the first place that is the model's, the rest of the block is the
model's, because it can compute those drafts in one go.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.ngram import NGramIndex

_BOUNDS = (1, 2, 3, 4, 8, 16)  # the least lengths of the classes
_USUAL_GUESS = 0.3  # share of guesses that are right, before any was judged
_MAX_SEQUENCES = 256  # n-grams of that many sequences are kept
_FREE = 0.05  # how much lower a guess's share may be, because a draft of the model costs time


def _class_of(length: int) -> int:
    return sum(length >= bound for bound in _BOUNDS)


class FlightChooser:
    """Chooses for one sequence, and learns from its tokens. ``guesses``, ``drafts``: by class, the shares of guesses
    and of the model's drafts that were right."""

    def __init__(self, guesses: Seq[Acceptance], drafts: Seq[Acceptance]) -> None:
        self._guesses, self._drafts = guesses, drafts
        self._index = NGramIndex(lambda guess, right: guesses[_class_of(guess.length)].add(1, int(right)))
        # By position: the draft; and for a draft of the model, how many tokens agree before the guess there.
        self._drafted: dict[int, tuple[int, int | None]] = {}

    def takes_guess(self, length: int) -> bool:
        """Return whether to use a guess, with ``length`` tokens that agree before it, instead of the model's draft."""
        i = _class_of(length)
        return length > 0 and self._guesses[i].share >= self._drafts[i].share - _FREE

    def guesses(self, tokens: Seq[int], ahead: Seq[int], count: int) -> list[int]:
        """Return up to ``count`` guesses after ``tokens`` and the drafts ``ahead``. They end where the model is better.

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
        """Index more tokens (``NGramIndex.catch_up``)."""
        return self._index.catch_up(tokens)

    def drafted(self, tokens: Seq[int], ahead: Seq[int], token_id: int, *, by_model: bool) -> None:
        """Note a draft after ``tokens`` and ``ahead``, to judge it later."""
        guess = self._index.look_up(tokens, ahead) if by_model else None
        length = None if not by_model else 0 if guess is None else guess.length
        self._drafted[len(tokens) + len(ahead)] = token_id, length

    def _judge(self, tokens: Seq[int]) -> None:
        for position in [position for position in sorted(self._drafted) if position < len(tokens)]:
            token_id, length = self._drafted.pop(position)
            if length is not None:
                self._drafts[_class_of(length)].add(1, int(token_id == tokens[position]))
            if token_id != tokens[position]:
                self._drafted.clear()  # the drafts after it followed another text
                break
        self._index.follow(tokens)


class Choosers:
    """The ``FlightChooser`` of each sequence; shares of all sequences are the priors of each."""

    def __init__(self) -> None:
        count, drafts = len(_BOUNDS) + 1, Acceptance()
        self._guesses = [Acceptance(usual=_USUAL_GUESS) for _ in range(count)]
        self._drafts = [Acceptance(drafts) for _ in range(count)]
        self._each: OrderedDict[int, FlightChooser] = OrderedDict()

    def of(self, seq_id: int) -> FlightChooser:
        """Return a sequence's chooser."""
        if seq_id not in self._each:
            shares = ([Acceptance(like) for like in every] for every in (self._guesses, self._drafts))
            self._each[seq_id] = FlightChooser(*shares)
            while len(self._each) > _MAX_SEQUENCES:
                self._each.popitem(last=False)
        return self._each[seq_id]

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's chooser."""
        self._each.pop(seq_id, None)

    def chosen(self, seq_id: int, tokens: Seq[int], drafts: Seq[int]) -> list[int]:
        """Return the drafts to use: a model's ``drafts`` after all ``tokens``, or guesses. All the model's drafts are
        judged, used or not, because they were made anyway."""
        chooser, own = self.of(seq_id), list(drafts)
        guesses = chooser.guesses(tokens, [], len(own))
        for i, token_id in enumerate(own):
            chooser.drafted(tokens, own[:i], token_id, by_model=True)
        return own if own[: len(guesses)] == guesses else guesses
