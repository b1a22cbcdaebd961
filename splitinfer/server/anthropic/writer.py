"""Answers in Anthropic's words: events of a stream, or one message made of the same pieces.

A message is a list of blocks. In a stream a block is open while its parts come and is closed by the next kind of part;
a call of a tool is a block of its own, whose input comes as pieces of JSON.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.server.answer import Answer, Piece, Usage, Writer
from splitinfer.server.stream import event, typed_event
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart, joined

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}
SIGNATURE = "splitinfer"
"""The signature of thinking: nobody checks it, but clients drop a block that has none."""
_PING = event({"type": "ping"}, "ping")  # comments do not count for these clients' watchdogs
Event = dict[str, Any]


@dataclass(slots=True)
class MessageWriter(Writer):
    """Writes one answer. ``hides_thinking``: the model's thinking is left out."""

    message_id: str
    model: str
    new_id: Callable[[], str] = lambda: f"toolu_{secrets.token_hex(12)}"
    hides_thinking: bool = False
    _index: int = -1  # of the open block, or of the last one
    _open: str | None = None  # the kind of block that is open

    # -- a stream ------------------------------------------------------------------------------

    def ping(self, answer: Answer) -> bytes:
        return _PING

    def begin(self, answer: Answer) -> bytes:
        """Return the event that starts a message. Its usage has only the prompt's tokens."""
        ended, usage = {"stop_reason": None, "stop_sequence": None}, usage_of(answer.usage)
        message = {**self._head(), "content": [], **ended, "usage": usage}
        return typed_event(_event("message_start", message=message)) + _PING

    def written(self, piece: Piece) -> bytes:
        return b"".join(map(typed_event, self.events(piece)))

    def events(self, piece: Piece) -> list[Event]:
        """Return the events of a piece's parts; at its end the open block is closed, but not where the answer has
        failed."""
        events = [one for part in self._shown(piece.parts) for one in self._part(part)]
        return events + (self._close() if piece.finish_reason not in (None, "error") else [])

    def end(self, last: Piece, usage: Usage) -> bytes:
        if last.finish_reason == "error":
            return event(last.problem.anthropic(), "error")
        delta = {"stop_reason": _reason(last), "stop_sequence": last.stop}
        return typed_event(_event("message_delta", delta=delta, usage=usage_of(usage))) + typed_event(
            _event("message_stop")
        )

    def _part(self, part: AnswerPart) -> list[Event]:
        match part:
            case TextPart(text):
                opened = self._opened("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case ReasoningPart(text):
                opened = self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallPart(name, arguments, call_id, ends):
                opened = list[Event]()
                if name is not None:
                    block: dict[str, Any] = {
                        "type": "tool_use",
                        "id": call_id or self.new_id(),
                        "name": name,
                        "input": {},
                    }
                    opened = [*self._close(), *self._opened("tool_use", block)]
                delta = self._delta({"type": "input_json_delta", "partial_json": arguments})
                return [*opened, delta, *(self._close() if ends else ())]
        raise AssertionError(part)

    def _opened(self, kind: str, block: dict[str, Any]) -> list[Event]:
        if self._open == kind:
            return []
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        before = [self._delta(signed)] if self._open == "thinking" else []
        self._open = None
        return [*before, _event("content_block_stop", index=self._index)]

    # -- a message -----------------------------------------------------------------------------

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        last = pieces[-1]
        blocks = [self._block(part) for part in joined(self._shown(part for piece in pieces for part in piece.parts))]
        ended = {"stop_reason": _reason(last), "stop_sequence": last.stop}
        return {**self._head(), "content": blocks, **ended, "usage": usage_of(usage)}

    def _block(self, part: AnswerPart) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"type": "text", "text": text}
            case ReasoningPart(text):
                return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
            case ToolCallPart(name, arguments, call_id):
                given = json.loads(arguments)
                return {"type": "tool_use", "id": call_id or self.new_id(), "name": name, "input": given}
        raise AssertionError(part)

    # -- both ----------------------------------------------------------------------------------

    def _shown(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        return [part for part in parts if not (self.hides_thinking and isinstance(part, ReasoningPart))]

    def _head(self) -> dict[str, Any]:
        return {"id": self.message_id, "type": "message", "role": "assistant", "model": self.model}


def _event(name: str, **data: Any) -> Event:
    return {"type": name, **data}


def _reason(piece: Piece) -> str:
    return "stop_sequence" if piece.stop is not None else _REASONS[piece.finish_reason or "stop"]


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return usage as Anthropic's API says it: tokens from the cache are no input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "service_tier": "standard",
    }
