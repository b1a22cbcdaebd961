"""An answer told apart as it grows: text for the reader, reasoning, and calls of tools.

Stop strings are the reader's: they end an answer where its text has one, and find none in the reasoning, in calls, or
in the marks around them. A text ends where another part follows: the text held back comes before that part.
"""

from collections.abc import Iterable, Sequence

from splitinfer.core.stops import StopMatcher, StopUpdate
from splitinfer.text.answer import AnswerParser, AnswerPart, TextPart, joined


class Apart:
    """Tells one answer apart (``core.stops.Told``). ``parser``: finds its parts. ``stops``: end its text."""

    def __init__(self, parser: AnswerParser, stops: Sequence[str] = ()) -> None:
        self._parser, self._stops, self._has_stops = parser, StopMatcher(stops), bool(stops)

    def feed(self, text: str) -> StopUpdate:
        """Take the next text of the answer, with the model's marks in it."""
        return self._update(self._parser.feed(text))

    def finish(self, *, is_cut: bool = False) -> StopUpdate:
        """Return the parts held back, when the answer has ended. ``is_cut``: it would have gone on."""
        update = self._update(self._parser.finish(is_cut=is_cut))
        held = self._stops.finish()
        return update if update.stopped is not None else _made([*update.parts, TextPart(held.text)])

    def _update(self, parts: Iterable[AnswerPart]) -> StopUpdate:
        if not self._has_stops:
            return _made(parts)
        found = list[AnswerPart]()
        for part in parts:
            if not isinstance(part, TextPart):
                found += [TextPart(self._stops.finish().text), part]
                continue
            update = self._stops.feed(part.text)
            found.append(TextPart(update.text))
            if update.stopped is not None:
                return _made(found, update.stopped)
        return _made(found)


def _made(parts: Iterable[AnswerPart], stopped: str | None = None) -> StopUpdate:
    said = joined(part for part in parts if not isinstance(part, TextPart) or part.text)
    return StopUpdate("".join(part.text for part in said if isinstance(part, TextPart)), stopped, tuple(said))
