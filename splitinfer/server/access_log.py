"""One line in the log for each request, when it is over: who asked for what, how it ended, tokens and seconds.

    request req_5f… laptop POST /v1/chat/completions 200, 5,120 of 20,412 prompt tokens cached, 311 generated, 14.2 s

Nothing of a prompt or an answer is in it, and of an address only its path, without what follows a question mark.
"""

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from splitinfer.server.answer import Usage
from splitinfer.server.reading import Answer

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's word for an answer that nobody waited for
_MOST_METHOD, _MOST_PATH = 20, 80  # characters


def line(request_id: str, key: str, method: str, path: str, status: int, usage: Usage | None, seconds: float) -> str:
    """The line of one request. ``usage``: of the answer, if one was asked for.

    >>> line("req_1", "laptop", "GET", "/v1/models", 200, None, 0.004)
    'request req_1 laptop GET /v1/models 200, 0.0 s'
    """
    tokens = "" if usage is None else (
        f", {usage.cached:,} of {usage.prompt:,} prompt tokens cached, {usage.generated:,} generated"
    )  # fmt: skip
    where = quote(path, safe="/:._-")[:_MOST_PATH]  # a path may hold anything, ends of lines included
    return f"request {request_id} {key} {method[:_MOST_METHOD]} {where} {status}{tokens}, {seconds:.1f} s"


def write(state: MutableMapping[str, Any], key: str, method: str, path: str, status: int, seconds: float) -> None:
    """Log a request. ``state``: of its scope, with its ``request_id`` and, once asked, its ``answer``."""
    if log.isEnabledFor(logging.INFO):
        answer: Answer | None = state.get("answer")
        usage = None if answer is None else answer.usage
        log.info("%s", line(state["request_id"], key, method, path, status, usage, seconds))
