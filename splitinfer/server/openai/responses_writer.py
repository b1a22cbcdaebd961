"""Responses in OpenAI's words: the events of a stream, or the one document that its last event holds.

A response is a list of items. In a stream an item is open while its parts come and is closed by the next kind of part:

    response.created, response.in_progress
    response.output_item.added                                  an item that is open and empty
        response.content_part.added                             of reasoning or of a message
        response.reasoning_text.delta | output_text.delta       any number
        response.reasoning_text.done | output_text.done
        response.content_part.done
        response.function_call_arguments.delta (any number), .done      of a call, instead
    response.output_item.done                                   the whole item
    response.completed | response.incomplete | response.failed  the whole response

A document is made by the same steps, so it cannot differ from a stream. Clients' watchdogs count events, not comments
(Codex's ``stream_idle_timeout_ms``), so what fills silence is another ``response.in_progress``.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.engine.loop.requests import TokenLogprobs
from splitinfer.server.answer import Answer, Piece, Usage, Writer
from splitinfer.server.openai.chat_writer import TokenText, token_logprob
from splitinfer.server.openai.responses import ResponseRequest, packed
from splitinfer.server.stream import typed_event
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart

Event = dict[str, Any]
_ENDED_IN_PART = ("length", "abort", "error")


@dataclass(slots=True)
class _OpenItem:
    """An item that has not ended: its first form, the kind of its parts, and its content so far."""

    kind: type[AnswerPart]
    item: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class ResponseWriter(Writer):
    """Writes one answer. ``created``, ``clock``: seconds since 1970. ``said``: fields of the request that it repeats.
    ``new_id`` makes an item's id that begins with a prefix."""

    response_id: str
    created: int
    model: str
    asked: ResponseRequest
    said: Mapping[str, Any]
    token_text: TokenText
    new_id: Callable[[str], str] = lambda prefix: f"{prefix}_{secrets.token_hex(12)}"
    clock: Callable[[], float] = time.time
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)  # that have ended
    _open: _OpenItem | None = None

    # -- the response --------------------------------------------------------------------------

    def begin(self, answer: Answer) -> bytes:
        return typed_event(self._event("response.created", response=self._response("in_progress"))) + self.ping(answer)

    def ping(self, answer: Answer) -> bytes:
        return typed_event(self._event("response.in_progress", response=self._response("in_progress")))

    def written(self, piece: Piece) -> bytes:
        return b"".join(map(typed_event, self.events(piece)))

    def end(self, last: Piece, usage: Usage) -> bytes:
        status, response = self._ended(last, usage)
        return typed_event(self._event(f"response.{status}", response=response))

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        for piece in pieces:
            self.events(piece)
        return self._ended(pieces[-1], usage)[1]

    def _ended(self, last: Piece, usage: Usage) -> tuple[str, dict[str, Any]]:
        status, more = _ended(last)
        if status == "completed":
            more = {**more, "completed_at": int(self.clock())}
        return status, {**self._response(status), **more, "output": list(self._items), "usage": usage_of(usage)}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self.said,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "service_tier": "default",
        }

    # -- items ---------------------------------------------------------------------------------

    def events(self, piece: Piece) -> list[Event]:
        """Return the events of a piece. The last piece also closes the open item. The probabilities of a piece's tokens
        come with its last text; a piece without text does not show them."""
        last_text = max((i for i, part in enumerate(piece.parts) if isinstance(part, TextPart)), default=-1)
        events = list[Event]()
        for i, part in enumerate(piece.parts):
            events += self._part(part, piece.logprobs if i == last_text else ())
        if piece.finish_reason is None:
            return events
        if piece.finish_reason == "stop" and not any(item["type"] == "message" for item in self._items):
            events += self._opened(TextPart)  # agents expect a message in every answer
        return events + self._closed("incomplete" if piece.finish_reason in _ENDED_IN_PART else "completed")

    def _part(self, part: AnswerPart, tokens: Sequence[TokenLogprobs]) -> list[Event]:
        match part:
            case TextPart(text):
                opened, logprobs = self._opened(TextPart), self._logprobs(tokens)
                return [*opened, self._delta("response.output_text.delta", text, logprobs=logprobs)]
            case ReasoningPart(text):
                opened = self._opened(ReasoningPart)
                return [*opened, self._delta("response.reasoning_text.delta", text)]
            case ToolCallPart():
                return self._call(part)
        raise AssertionError(part)

    def _opened(self, kind: type[AnswerPart]) -> list[Event]:
        if self._open is not None and self._open.kind is kind:
            return []
        closed, begun = self._closed(), {"status": "in_progress", "content": list[Any]()}
        if kind is TextPart:
            item, part = {"id": self.new_id("msg"), "type": "message", "role": "assistant", **begun}, _text_part("")
        else:
            item, part = {"id": self.new_id("rs"), "type": "reasoning", **begun, "summary": []}, _reasoning_part("")
        self._open = _OpenItem(kind, item)
        return [*closed, self._item_event("added", item), self._part_event("response.content_part.added", part=part)]

    def _delta(self, name: str, text: str, **more: Any) -> Event:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += more.get("logprobs", ())
        return self._part_event(name, delta=text, **more)

    def _closed(self, status: str = "completed") -> list[Event]:
        if (ending := self._open) is None:
            return []
        text, item = "".join(ending.texts), {**ending.item, "status": status}
        if ending.kind is ToolCallPart:  # cut arguments are not done
            item["arguments"] = text
            whole = status == "completed"
            events = [self._arguments_event("done", item, arguments=text)] if whole else []
        elif ending.kind is TextPart:
            item["content"] = [part := _text_part(text, ending.logprobs)]
            events = [self._part_event("response.output_text.done", text=text, logprobs=ending.logprobs)]
        else:
            item["content"] = [part := _reasoning_part(text)]
            item |= {"encrypted_content": packed(text)} if self.asked.packs_reasoning else {}
            events = [self._part_event("response.reasoning_text.done", text=text)]
        if ending.kind is not ToolCallPart:
            events.append(self._part_event("response.content_part.done", part=part))
        events.append(self._item_event("done", item))
        self._open = None
        self._items.append(item)
        return events

    def _call(self, part: ToolCallPart) -> list[Event]:
        events = list[Event]()
        if part.name is not None:
            own = next((one for one in self.asked.functions if one.told_name == part.name), None)
            events += self._closed()
            item = {
                "id": self.new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": part.call_id or self.new_id("call"),
                "name": part.name if own is None else own.name,
                "arguments": "",
                **({} if own is None or own.namespace is None else {"namespace": own.namespace}),
            }
            self._open = _OpenItem(ToolCallPart, item)
            events.append(self._item_event("added", item))
        assert self._open is not None
        self._open.texts.append(part.arguments)
        events.append(self._arguments_event("delta", self._open.item, delta=part.arguments))
        return [*events, *(self._closed() if part.ends else ())]

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        num_top = self.asked.num_top
        return [] if num_top is None else [token_logprob(one, num_top, self.token_text) for one in tokens]

    # -- events --------------------------------------------------------------------------------

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{what}", output_index=len(self._items), item=item)

    def _arguments_event(self, what: str, item: dict[str, Any], **data: Any) -> Event:
        where = {"item_id": item["id"], "output_index": len(self._items)}
        return self._event(f"response.function_call_arguments.{what}", **where, **data)

    def _part_event(self, name: str, **data: Any) -> Event:
        assert self._open is not None
        where = {"item_id": self._open.item["id"], "output_index": len(self._items), "content_index": 0}
        return self._event(name, **where, **data)

    def _event(self, name: str, **data: Any) -> Event:
        number, self._sequence = self._sequence, self._sequence + 1
        return {"type": name, "sequence_number": number, **data}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _ended(last: Piece) -> tuple[str, dict[str, Any]]:
    """Return an answer's status at its end, and the fields that say why."""
    match last.finish_reason:
        case "error":
            return "failed", {"error": {"code": "server_error", "message": last.problem.message}}
        case "length":
            return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        case "abort":
            return "incomplete", {}  # the API has no word for why
        case _:
            return "completed", {}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.generated,
    }
