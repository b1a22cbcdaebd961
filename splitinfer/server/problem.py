"""Tells a client, in the words of its API, why the server cannot carry out its request.

The sentence is the same everywhere; each API wraps it in its own form. Clients decide by the status and the kind
whether to try again, so these follow the APIs' documentation ("Error codes", "Errors").
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ContextExceeded, Draining, ModelError, NotInstalled, RequestError, SplitinferError

_TOO_LONG = "context_length_exceeded"
"""OpenAI's word. Anthropic's API has none, so that clients look for "prompt is too long" in the sentence. By either
they know that the conversation has to be shortened (*assumed* of Claude Code, by what it says, claude-code #46348)."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPICS = {**_KINDS, 413: "request_too_large", 503: "overloaded_error"}
_OTHER = "invalid_request_error"
_NOT_NOW = "the server cannot carry this out now; its log says why"
_MOST_MESSAGE, _MOST_PARAM = 1000, 200  # characters
AGAIN = 5.0
"""Seconds after which a pipeline that ends or has failed may be there again, started by whatever keeps it running."""
_ENDING = 10.0  # seconds until another server may replace it


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback
class Problem(Exception):
    """Why a request is not carried out.

    status: of HTTP, from 400 on.
    message: one sentence for a person.
    param: the wrong field, if there is one.
    code: a word for programs, if OpenAI's API has one.
    retry_after: seconds after which the request may succeed, if it may.
    allow: the allowed methods, if this one is not.
    details: data for Anthropic's clients, where a word is not enough.
    closes: whether to close the connection.

    Quotes from the request are cut to a length, so that an answer is not larger than the request.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    allow: tuple[str, ...] = ()
    details: Mapping[str, Any] | None = None
    closes: bool = False

    def __post_init__(self) -> None:
        self.message, self.param = _cut(self.message, _MOST_MESSAGE), self.param and _cut(self.param, _MOST_PARAM)

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        if self.allow:
            headers["Allow"] = ", ".join(self.allow)
        if self.closes:
            headers["Connection"] = "close"
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers

    def openai(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else _OTHER)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str = "") -> dict[str, Any]:
        kind = _ANTHROPICS.get(self.status, "api_error" if self.status >= 500 else _OTHER)
        named = {"request_id": request_id} if request_id else {}
        more = {} if self.details is None else {"details": dict(self.details)}
        message = f"prompt is too long: {self.message}" if self.code == _TOO_LONG else self.message
        return {"type": "error", "error": {"type": kind, "message": message, **more}, **named}


ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""Where the paths of these APIs begin."""


def form_of(problem: Problem, path: str, request_id: str = "") -> dict[str, Any]:
    """Return the problem in the form of the API that ``path`` belongs to."""
    if path.startswith(OLLAMA):
        return {"error": problem.message}
    return problem.anthropic(request_id) if path.startswith(ANTHROPIC) else problem.openai()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def ending() -> Problem:
    """Return the problem of a server that is shutting down. A request may come just before the pipeline hears of it."""
    return Problem(503, "the server was told to end, and takes no new request", retry_after=_ENDING)


def problem_of(error: SplitinferError, failure: str | None = None) -> Problem:
    """Return the problem that a client sees for an error of the library. ``failure``: why the pipeline no longer
    accepts requests (``PipelineHealth``). ``Service.admitted`` reports a full queue.

    A client may read its own mistake. Any other error's text may have addresses, folders and words of libraries, so it
    belongs in the log only.
    """
    if isinstance(error, Draining):
        return ending()
    if isinstance(error, ContextExceeded):
        return Problem(400, f"{error}", code=_TOO_LONG)
    if isinstance(error, RequestError):
        return Problem(400, f"{error}")
    if isinstance(error, NotInstalled):
        return Problem(501, f"{error}")
    return Problem(503, failure or _NOT_NOW, retry_after=None if isinstance(error, ModelError) else AGAIN)


def invalid(param: str, sentence: str) -> Problem:
    return Problem(400, sentence, param=param, code="invalid_value")


def unsupported(name: str, why: str, value: object = None) -> Problem:
    shown = "" if value is None else f" {value!r:.40}"
    sentence = f"{name}{shown} is not supported: {why}"
    return Problem(400, sentence, param=name, code="unsupported_parameter")
