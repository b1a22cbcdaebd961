"""A valid request of every route, and what is wrong with an answer, if anything."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = ("Content-Type", "application/json")
TALE = [{"role": "user", "content": "Once upon a time"}]
BODIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""A valid request of every route that takes a body."""


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


_OPENAI = {"message", "type", "param", "code"}


def trouble_with(status: int, headers: dict[str, str], document: Any, *, is_anthropic: bool) -> str | None:
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
