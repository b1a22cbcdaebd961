"""Stop strings in streamed text.

A stop string may begin in one token and end three tokens later. So a suffix that may still grow into one is held back,
and the text before it is emitted at once:

    stop    "User:"
    text    "Fine. Us"
             ~~~~~~ emit   ~~ hold: the longest suffix that some stop string begins with

The stop string that is complete first counts, as if the text came character by character. If several end at the same
character, the longest counts. So the answer never depends on how its text was cut into increments. For stops "abcd" and
"bc" in "abcd" it is "bc": a stream cannot wait to see whether a longer stop is completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StopUpdate:
    """The result of one increment: the ``text`` to emit now, and the stop string that ended the text, if one did.
    ``parts``: if the answer is split into kinds of text, all parts to emit now, also those in ``text``
    (``text.answer.AnswerPart``)."""

    text: str
    stopped: str | None = None
    parts: tuple[Any, ...] = ()


class Told(Protocol):
    """Decides which parts of an answer's growing text the reader gets, and whether a stop string has ended it."""

    def feed(self, text: str) -> StopUpdate:
        """Take the next increment."""

    def finish(self, *, is_cut: bool) -> StopUpdate:
        """Return the text held back when the answer has ended. ``is_cut``: whether it was cut off."""


class StopMatcher:
    """Finds stop strings in one request's text. ``SamplingParams`` has checked that each has characters. ``held``: the
    text held back, which is emitted later, or dropped as the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self.held = ""
        self._stopped: str | None = None

    def feed(self, text: str) -> StopUpdate:
        """Take the next increment. Text after a stop string is dropped."""
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
        """Return the text held back when the text has ended without a complete stop string."""
        held, self.held = self.held, ""
        return StopUpdate(held)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that a stop string begins with."""
        longest = min(len(text), self._longest - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
