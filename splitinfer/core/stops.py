"""Stop strings in streamed text.

Text arrives in increments that know nothing of stop strings: one may begin in one token and end three
tokens later. Two things follow.

What to emit. A suffix that may still grow into a stop string must wait, and nothing else may:

    stop    "User:"
    text    "Fine. Us"
             ~~~~~~ emit   ~~ hold: the longest suffix that some stop string begins with

No stop string can begin before that suffix, so the text in front of it is nobody's and goes out at once.

Which stop counts. The one that is complete first, as if the text came character by character; of several
that end at the same character, the longest (it begins earliest and so cuts most). So the answer depends on
the text alone and never on how it was cut into increments. For stops "abcd" and "bc" in "abcd" that is
"bc", though "abcd" begins earlier: a stream cannot wait to see whether a longer one comes true.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from splitinfer.errors import RequestError


@dataclass(frozen=True, slots=True)
class StopUpdate:
    """What one increment led to: the ``text`` to emit now, and the stop string that was met, if one was."""

    text: str
    stopped: str | None = None


class StopMatcher:
    """Watches one request's text for its stop strings.

    Raises ``RequestError`` for an empty stop string: it is in every text, before its first character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):  # a str is a sequence of one-letter stops, which nobody means
            stops = (stops,)
        for number, stop in enumerate(stops, start=1):
            if not stop:
                raise RequestError(f"stop string {number} of {len(stops)} is empty; leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped: str | None = None

    @property
    def held(self) -> str:
        """The text that waits: emitted later, or dropped as the beginning of a stop string."""
        return self._held

    def feed(self, text: str) -> StopUpdate:
        """Take the next increment. After a stop string everything further is dropped."""
        if self._stopped is not None:
            return StopUpdate("", self._stopped)
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self._stopped = min(found)
            self._held = ""
            return StopUpdate(text[:start], self._stopped)
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return StopUpdate(text[:keep])

    def flush(self) -> str:
        """The held-back text, once nothing more comes: it did not become a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that a stop string begins with."""
        longest = min(len(text), self._longest - 1)
        return next((size for size in range(longest, 0, -1) if self._begins_a_stop(text[-size:])), 0)

    def _begins_a_stop(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)
