"""What must come of damaged bytes over a connection: answers in the form of their API, or its end."""

from mutating import Sent
from raw_http import Exchange, Said
from valid_requests import trouble_with

NO_HTTP = b"Invalid HTTP request received."


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
