"""What an answer to a damaged request must be: never a fault of the server's, and in the form of its API."""

from typing import Any

from mutating import Sent
from raw_http import Exchange, Said

UNAVAILABLE = 503  # documented; a healthy server with room never says it
NO_HTTP = b"Invalid HTTP request received."
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
        ok = document.get("type") == "error" and set(error) == {"type", "message"}
    else:
        ok = set(error) == _OPENAI
    return None if ok else f"another form: {document!r:.120}"


def verdict(sent: Sent, came: Exchange) -> str | None:
    """What is wrong with the answers to what was sent over one connection, if anything."""
    if came.trouble is not None:
        return came.trouble
    for i, said in enumerate(came.answers):
        if sent.is_head and "x-request-id" in said.headers:
            continue  # no body
        no_http = b"" if sent.is_head else NO_HTTP
        wrong = _judge(said, sent.paths_are_anthropic[min(i, len(sent.paths_are_anthropic) - 1)], no_http)
        if wrong is not None:
            return f"answer {i}: {wrong}"
    if sent.num_answers is None or len(came.answers) >= sent.num_answers:
        return None
    closes = bool(came.answers) and came.answers[-1].headers.get("connection") == "close"
    return None if closes else f"{len(came.answers)} answers of {sent.num_answers}, and closed"


def _judge(said: Said, is_anthropic: bool, no_http: bytes) -> str | None:
    """``no_http``: what a reader of the answer sees of the body that refuses bytes that are no HTTP."""
    if "x-request-id" not in said.headers:  # it reached no API: bytes that are no HTTP
        is_refusal = (said.status, said.headers.get("connection")) == (400, "close") and said.body == no_http
        return None if is_refusal else f"{said.status} without an id: {said.body[:80]!r}"
    return trouble_with(said.status, said.headers, said.json, is_anthropic=is_anthropic)
