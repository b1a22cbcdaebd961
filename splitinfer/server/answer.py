"""An answer as it grows: what comes of each choice, told apart into parts. Pure; `reading` feeds it with events.

A choice ends for a reason that every API translates: "stop", "length", "tool_calls" where the model called a tool,
"abort" or "error". A choice that shall have one call only ends with it, whatever the model would add.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from splitinfer.engine.coordinator.requests import StreamEvent, TokenLogprobs
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart


class Parser(Protocol):
    """Tells an answer's parts apart (``text.answer.AnswerParser``)."""

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are certain with the next text."""
        ...

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back."""
        ...


class PlainText:
    """The parser of an answer in which nothing is marked."""

    def feed(self, text: str) -> list[AnswerPart]:
        """The text as it is."""
        return [TextPart(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """Nothing is held back."""
        return []


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; those of a prompt count once, whatever the number of choices. ``reasoning``: of those that
    were generated, the ones of reasoning. ``tried``, ``right``: drafts that came to a verdict, and those of them that
    became tokens."""

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    tried: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. ``finish_reason``: set on its last piece. ``error``: why it failed, if it did.
    ``stop``: the stop string that ended it, if one did."""

    choice: int
    parts: tuple[AnswerPart, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    stop: str | None = None


@dataclass(slots=True)
class ChoiceReader:
    """Makes pieces of one choice's events. ``one_call``: it ends with its first call. ``num_reasoning_tokens``: those
    of pieces that begin with reasoning, so that the markers around it count for what follows them."""

    choice: int
    parser: Parser
    one_call: bool = False
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    _num_told: int = 0  # tokens of the pieces so far
    _has_called: bool = False
    _has_ended: bool = False
    _logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens whose text is still held back

    @property
    def has_ended(self) -> bool:
        """Whether its last piece was made."""
        return self._has_ended

    def read(self, event: StreamEvent) -> Piece | None:
        """The next piece; ``None`` while all that came is held back, or behind the end."""
        if self._has_ended:
            return None
        self.num_tokens += len(event.token_ids)
        self._logprobs += event.logprobs
        parts, reason = self.parser.feed(event.text), event.finish_reason
        if reason is not None:
            parts += self.parser.finish()
        parts, is_cut = self._up_to_call(parts)
        self._has_called |= any(isinstance(part, ToolCallPart) for part in parts)
        ends = reason is not None or is_cut
        if not parts and not ends:
            return None
        self._has_ended = ends
        self._count(parts)
        logprobs, self._logprobs = tuple(self._logprobs), []
        ended = self._reason(reason) if ends else None
        return Piece(self.choice, tuple(parts), logprobs, ended, event.error, event.stop)

    def _count(self, parts: Sequence[AnswerPart]) -> None:
        if parts and isinstance(parts[0], ReasoningPart):
            self.num_reasoning_tokens += self.num_tokens - self._num_told
        self._num_told = self.num_tokens

    def _up_to_call(self, parts: Sequence[AnswerPart]) -> tuple[list[AnswerPart], bool]:
        """The parts up to the first call, if that is the last; and whether they were cut there."""
        if self.one_call:
            for i, part in enumerate(parts):
                if isinstance(part, ToolCallPart):
                    return list(parts[: i + 1]), True
        return list(parts), False

    def _reason(self, reason: str | None) -> str:
        if self._has_called and reason in (None, "stop"):
            return "tool_calls"
        return reason or "stop"
