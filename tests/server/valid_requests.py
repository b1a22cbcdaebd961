"""A valid request of every route, and what is wrong with an answer, if anything."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

JSON = ("Content-Type", "application/json")
TALE = [{"role": "user", "content": "Once upon a time"}]
_FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "seed": 1, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": True,
    "logit_bias": {"1": 2.0},
}  # fmt: skip
_CHAT = {
    **_SAMPLING, "model": "m", "max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": False,
    "parallel_tool_calls": True, "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "auto",
    "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}, "messages": [
        {"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
}  # fmt: skip
_COMPLETIONS = {**_SAMPLING, "model": "m", "max_tokens": 2, "n": 2, "echo": True, "prompt": ["x", [1, 2]]}
_COUNTED_RESPONSE = {
    "model": "m", "instructions": "x", "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "auto",
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
}  # fmt: skip
_RESPONSES = {
    **_COUNTED_RESPONSE, "max_output_tokens": 2, "metadata": {"a": "b"}, "stream": True, "temperature": 0.5,
    "include": ["message.output_text.logprobs"], "top_logprobs": 1,
}  # fmt: skip
_COUNTED_MESSAGE = {
    "model": "m", "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "w", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}, "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x", "signature": ""}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "c", "name": "w", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
    ],
}  # fmt: skip
_MESSAGES = {
    **_COUNTED_MESSAGE, "max_tokens": 2, "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4,
    "stream": True, "metadata": {"user_id": "x"},
}  # fmt: skip

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _COUNTED_RESPONSE,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _COUNTED_MESSAGE,
    "/tokenize": {
        "messages": TALE,
        "return_token_strs": True,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "chat_template_kwargs": {"x": 1},
    },
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": TALE, "chat_template_kwargs": {"x": 1}},
    "/session": {},
}
"""A valid request of every route that takes a body."""
WITHOUT_BODY = (
    ("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("GET", "/health"), ("DELETE", "/v1/requests/x"),
    ("DELETE", "/session"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One request. ``what``: how it was damaged."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    what: str = "valid"

    @property
    def is_anthropic(self) -> bool:
        """Whether its errors have Anthropic's form."""
        path = re.sub("^https?://[^/]*", "", self.target.partition("?")[0])
        return unquote(path).startswith("/v1/messages")

    def and_then(self, what: str, **changes: Any) -> "Asked":
        """The request with a further damage."""
        return replace(self, what=f"{self.what}, {what}", **changes)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


_OPENAI = {"message", "type", "param", "code"}


def trouble_with(status: int, headers: dict[str, str], document: Any, *, is_anthropic: bool) -> str | None:
    """What is wrong with an answer, if anything. ``document``: its JSON."""
    if status >= 500:
        return f"status {status}"
    if status < 400:
        return None
    if "application/json" not in headers.get("content-type", ""):
        return f"{status} is {headers.get('content-type')!r}"
    return _form_trouble(document, is_anthropic=is_anthropic)


def _form_trouble(document: Any, *, is_anthropic: bool) -> str | None:
    if not isinstance(document, dict) or not isinstance(error := document.get("error"), dict):
        return f"no error: {document!r:.80}"
    if not isinstance(message := error.get("message"), str) or not message:
        return "an error without a sentence"
    if len(str(document)) > 5000:
        return f"an error of {len(str(document)):,} characters"
    if is_anthropic:
        ok = document.get("type") == "error" and set(error) - {"details"} == {"type", "message"}
    else:
        ok = set(error) == _OPENAI
    return None if ok else f"another form: {document!r:.120}"
