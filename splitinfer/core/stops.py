"""Stop strings in streamed text.

One may begin in one token and end three tokens later. So a suffix that may still grow into one is held back, and what
is in front of it is emitted at once:

    stop    "User:"
    text    "Fine. Us"
             ~~~~~~ emit   ~~ hold: the longest suffix that some stop string begins with

The one counts that is complete first, as if the text came character by character; of several that end at the same
character, the longest. So the answer never depends on how its text was cut into increments. For stops "abcd" and "bc"
in "abcd" that is "bc": a stream cannot wait to see whether a longer stop is completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StopUpdate:
    """The result of one increment: the ``text`` to emit now, and the stop string that ended it, if one did. ``parts``:
    where the answer is told apart, all that there is to emit, the text among it (``text.answer.AnswerPart``)."""

    text: str
    stopped: str | None = None
    parts: tuple[Any, ...] = ()


class Told(Protocol):
    """Decides what a reader gets of one answer's text as it grows, and whether a stop string has ended it."""

    def feed(self, text: str) -> StopUpdate:
        """Take the next increment."""

    def finish(self, *, is_cut: bool) -> StopUpdate:
        """Return the text held back, when the answer has ended. ``is_cut``: it would have gone on."""


class StopMatcher:
    """Finds stop strings in one request's text. ``SamplingParams`` has checked them: none is empty. ``held``: the text
    held back, which is emitted later, or dropped as the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self.held = ""
        self._stopped: str | None = None

    def feed(self, text: str) -> StopUpdate:
        """Take the next increment. All text after a stop string is dropped."""
        if self._stopped is not None:
            return StopUpdate("", self._stopped)
        text = self.held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self._stopped = min(found)
            self.held = ""
            return StopUpdate(text[:start], self._stopped)
        keep = len(text) - self._num_held(text)
        self.held = text[keep:]
        return StopUpdate(text[:keep])

    def finish(self, *, is_cut: bool = False) -> StopUpdate:
        """Return the text held back as an update."""
        return StopUpdate(self.flush())

    def flush(self) -> str:
        """Return the text held back, when the text has ended without completing a stop string."""
        held, self.held = self.held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return length of the longest suffix of ``text`` that a stop string begins with."""
        longest = min(len(text), self._longest - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
