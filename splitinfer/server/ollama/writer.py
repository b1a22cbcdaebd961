"""Answers in Ollama's words: lines of a stream, or one document made of the same pieces. Times are nanoseconds."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from splitinfer.server.answer import Answer, ChoiceTimes, Piece, Usage, Writer
from splitinfer.server.ollama.requests import GenerateRequest, Generating
from splitinfer.server.openai.chat_writer import TokenText, token_logprob
from splitinfer.server.stream import LINE_PING, NDJSON, line
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart

_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "length"}


def moment(seconds: float) -> str:
    """Return the seconds since 1970 as Ollama writes them.

    >>> moment(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class OllamaWriter(Writer):
    """Writes one answer. ``asked``: the request, which says what to show. ``began``: when the request came, in seconds
    on the monotonic clock. ``times``: returns the times of the answer."""

    model: str
    asked: Generating
    token_text: TokenText
    began: float
    times: Callable[[], ChoiceTimes]

    media_type: ClassVar[str] = NDJSON

    def ping(self, answer: Answer) -> bytes:
        return LINE_PING

    def written(self, piece: Piece) -> bytes:
        """Return the lines of a piece, without the answer's last line."""
        lines = [{**self.head(), **self._said([part]), "done": False} for part in piece.parts]
        if lines and piece.logprobs:
            lines[-1] |= self._logprobs([piece])
        return b"".join(map(line, lines))

    def end(self, last: Piece, usage: Usage) -> bytes:
        failed = last.finish_reason == "error"
        return line({"error": last.problem.message} if failed else self.last(last, usage))

    def last(self, piece: Piece, usage: Usage, parts: Sequence[AnswerPart] = ()) -> dict[str, Any]:
        """Return the line that ends an answer. ``parts``: the parts in that line itself."""
        reason = {"done": True, "done_reason": _REASONS[piece.finish_reason or "stop"]}
        return {**self.head(), **self._said(parts), **reason, **self._figures(usage)}

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        if not pieces:  # the request was to load the model, which is loaded now
            reason = "unload" if self.asked.keep_alive == 0 else "load"
            return {**self.head(), **self._said(()), "done": True, "done_reason": reason}
        last = self.last(pieces[-1], usage, [part for piece in pieces for part in piece.parts])
        return {**last, **self._logprobs(pieces)}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        found, num_top = [one for piece in pieces for one in piece.logprobs], self.asked.num_top
        return {} if num_top is None else {"logprobs": [token_logprob(one, num_top, self.token_text) for one in found]}

    def head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": moment(time.time())}

    def _said(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        thinking = {"thinking": reasoning} if reasoning else {}
        if isinstance(self.asked, GenerateRequest):
            return {"response": text, **thinking}
        calls = [_call(part) for part in parts if isinstance(part, ToolCallPart)]
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    def _figures(self, usage: Usage) -> dict[str, Any]:
        times, now = self.times(), time.monotonic()
        begun = times.begun or times.submitted
        first = times.first or now
        return {
            "total_duration": _nanoseconds(self.began, now),
            "load_duration": _nanoseconds(self.began, begun),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(begun, first),
            "eval_count": usage.generated,
            "eval_duration": _nanoseconds(first, times.last or now),
        }


def _call(part: ToolCallPart) -> dict[str, Any]:
    named = {} if part.call_id is None else {"id": part.call_id}
    return {**named, "function": {"name": part.name, "arguments": json.loads(part.arguments)}}


def _nanoseconds(start: float, end: float) -> int:
    return max(0, int((end - start) * 1e9))
