"""Answers of `POST /v1/chat/completions`: chunks of a stream, or one document made of the same pieces.

Reasoning is written under both names that clients know, ``reasoning`` and ``reasoning_content``. The first delta of a
tool call has its index, id and name; the following deltas have more of its arguments.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from splitinfer.engine.loop.requests import Reading, TokenLogprobs
from splitinfer.server.answer import Answer, Piece, Usage, Writer
from splitinfer.server.openai.generating import Streaming
from splitinfer.server.stream import COMMENT_PING, PING_EVERY, PROGRESS_EVERY, event, json_line
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart

TokenText = Callable[[int], bytes]
"""The bytes of one token id."""

# A request ended by its id or its deadline has an answer that is cut off, as by its token limit.
REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "abort": "length"}
_DONE = event("[DONE]")


@dataclass(slots=True)
class ChunkWriter(Writer):
    """The common base for the writers of chats and completions. ``created``: seconds since 1970. ``asked``: the
    request, which says what to show. ``fingerprint``: with the same fingerprint, the same seed gives the same answer.
    """

    answer_id: str
    created: int
    model: str
    asked: Streaming
    token_text: TokenText
    answer: Answer
    fingerprint: str | None = None
    _reported: int | None = None  # read tokens of the prompt, as reported
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # the JSON around a choice's text

    kind: ClassVar[str]
    text_name: ClassVar[str]
    """The field of a choice's text."""

    @property
    def ping_every(self) -> float:
        return PROGRESS_EVERY if self.asked.return_progress else PING_EVERY

    def ping(self, answer: Answer) -> bytes:
        reading = answer.reading if self.asked.return_progress else None
        return COMMENT_PING if reading is None else self._progress(reading)

    def _progress(self, reading: Reading) -> bytes:
        """Return the chunk that says how far the prompt is read. Before the first one comes a chunk for the cached
        tokens."""
        told = [] if self._reported is not None else [replace(reading, read=reading.cached, since=0.0, seconds=0.0)]
        told += [reading] if reading.read != reading.cached else []
        self._reported = reading.read
        return b"".join(event({**self.chunk([self.choice(0)]), **progress_of(one)}) for one in told)

    def written(self, piece: Piece) -> bytes:
        """Return the chunks of a piece; before the first one, say that the whole prompt is read."""
        if not self.asked.return_progress or self._reported == (read := self.answer.first_reading).total:
            return self.events(piece)
        return self._progress(read) + self.events(piece)

    def events(self, piece: Piece) -> bytes:
        if (text := self.only_text(piece)) is not None:
            return self.text_event(piece.choice, text)
        return b"".join(map(event, self.chunks(piece)))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of a piece."""
        raise NotImplementedError

    def end(self, last: Piece, usage: Usage) -> bytes:
        """Return the usage, where it was asked for. An answer that failed has no end of its own: whoever looks for a
        reason to finish finds an error instead."""
        if last.finish_reason == "error":
            return event(last.problem.openai()) + _DONE
        counts = self.asked.stream_options.include_usage
        return (event({**self.chunk([]), "usage": self.usage(usage)}) if counts else b"") + _DONE

    def only_text(self, piece: Piece) -> str | None:
        """Return the text of a piece whose chunk has no other news. Return None if it has."""
        match piece.parts:
            case (TextPart(text),) if not (piece.finish_reason or self.asked.num_top is not None or self.counts_always):
                return text
        return None

    def text_event(self, choice: int, text: str) -> bytes:
        """Return the event of nothing but text, which nearly every token is: all but the text is always the same."""
        frame = self._frames.get(choice)
        if frame is None:
            # In any other place these characters have escaped quotation marks, or come earlier.
            field_ = f'"{self.text_name}":""'.encode()
            (chunk,) = self.chunks(Piece(choice, (TextPart(""),)))
            before, name, after = event(chunk).rpartition(field_)
            frame = self._frames[choice] = before + name[:-2], after
        return frame[0] + json_line(text).encode("utf-8", "replace") + frame[1]

    def choice(self, index: int) -> dict[str, Any]:
        """Return a choice without news."""
        raise NotImplementedError

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        so_far = self.usage(self.answer.usage) if self.counts_always else None
        counts = self.asked.stream_options.include_usage
        return {**self.head(), "choices": choices, **({"usage": so_far} if counts else {})}

    @property
    def counts_always(self) -> bool:
        """Whether every chunk has the usage so far."""
        options = self.asked.stream_options
        return options.include_usage and options.continuous_usage_stats

    def usage(self, usage: Usage) -> dict[str, Any]:
        return usage_of(usage)

    def head(self) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}


@dataclass(slots=True)
class ChatWriter(ChunkWriter):
    """Writes one answer."""

    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    _num_calls: dict[int, int] = field(default_factory=dict)  # by choice

    kind, text_name = "chat.completion.chunk", "content"

    # -- a stream ------------------------------------------------------------------------------

    def begin(self, answer: Answer) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(event(self.chunk([_choice(i, first)])) for i in range(answer.num_choices))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of a piece: one for each part; the last has the log probabilities, and another the
        reason."""
        deltas = [self._delta(piece.choice, part) for part in piece.parts]
        chunks = [_choice(piece.choice, delta) for delta in deltas]
        if piece.logprobs and self.asked.num_top is not None:
            chunks = chunks or [self.choice(piece.choice)]
            chunks[-1]["logprobs"] = self._logprobs(piece.logprobs)
        if piece.finish_reason not in (None, "error"):
            chunks.append({**self.choice(piece.choice), "finish_reason": REASONS[piece.finish_reason]})
        return [self.chunk([chunk]) for chunk in chunks]

    def choice(self, index: int) -> dict[str, Any]:
        return _choice(index, {})

    # -- a document ----------------------------------------------------------------------------

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [self._whole(choice, pieces) for choice in sorted({piece.choice for piece in pieces})]
        return {**self.head(), "object": "chat.completion", "choices": choices, "usage": usage_of(usage)}

    def _whole(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        own = [piece for piece in pieces if piece.choice == choice]
        parts = [part for piece in own for part in piece.parts]
        logprobs = [one for piece in own for one in piece.logprobs]
        return {
            "index": choice,
            "message": self._message(choice, parts),
            "logprobs": None if self.asked.num_top is None else self._logprobs(logprobs),
            "finish_reason": REASONS[own[-1].finish_reason or "stop"],
        }

    def _message(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        calls = [self._call(choice, part) for part in parts if isinstance(part, ToolCallPart)]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [{key: one for key, one in call.items() if key != "index"} for call in calls]
        return message

    # -- both ----------------------------------------------------------------------------------

    def _delta(self, choice: int, part: AnswerPart) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCallPart():
                return {"tool_calls": [self._call(choice, part)]}
        raise AssertionError(part)

    def _call(self, choice: int, part: ToolCallPart) -> dict[str, Any]:
        index = self._num_calls.get(choice, 0)
        if part.name is None:
            return {"index": index - 1, "function": {"arguments": part.arguments}}
        self._num_calls[choice] = index + 1
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": index, "id": part.call_id or self.new_id(), "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [token_logprob(one, self.asked.num_top or 0, self.token_text) for one in tokens]
        return {"content": content, "refusal": None}


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def token_logprob(one: TokenLogprobs, num_top: int, token_text: TokenText) -> dict[str, Any]:
    """Return the log probabilities of a token and of the ``num_top`` likeliest tokens there, in OpenAI's form."""

    def written(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_text(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {**written(one.token_id, one.logprob), "top_logprobs": [written(*top) for top in one.top[:num_top]]}


def progress_of(reading: Reading) -> dict[str, Any]:
    """Return how far a prompt is read, as llama.cpp's server says it; and the seconds left, once they can be told."""
    counts = {"total": reading.total, "cache": reading.cached, "processed": reading.read}
    times = {"time_ms": round(1000 * (reading.seconds + reading.since)), "seconds_left": reading.seconds_left}
    return {"prompt_progress": counts | times}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return usage as OpenAI's API says it, and in a field of our own, where there were drafts, what became of them.
    (OpenAI's ``accepted_prediction_tokens`` is of predictions that a client sends.)"""
    drafts = {"splitinfer": {"drafts_tried": usage.tried, "drafts_right": usage.right}} if usage.tried else {}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        **drafts,
    }
