"""Reads a request's body as JSON in UTF-8, with bounds on its bytes and its time, alone and together with other bodies.

A large body is parsed on a thread, and its request is validated there: a million values take seconds. The parsed JSON
can always be written again. Python also reads NaN and infinity, which JSON does not have. Half a character (a lone
surrogate, ``"\\ud800"``) cannot be sent or tokenized, so it is read as U+FFFD: a client that cut a text in the middle
of one sends it in every turn. JSON nested a thousand levels deep would break templates and every recursive function.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from splitinfer.common.json_text import is_deeper
from splitinfer.common.plain_text import whole_characters
from splitinfer.server.fields import Fields, read
from splitinfer.server.problem import Problem

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Fields)

MAX_BYTES = 32 << 20  # a conversation that fills a context of a million tokens has about 5 MB
MAX_TOGETHER = 16 * MAX_BYTES  # of all requests under way: a body is in memory until its answer is over
READ_SECONDS = 30.0  # for a client to send the body
_SOON_PARSED = 1 << 17  # bytes that take about a millisecond


@dataclass(slots=True)
class Bodies:
    """The bytes of the bodies of all requests under way. Each gives its own part back at the end."""

    most: int = MAX_TOGETHER
    held: int = 0

    def add(self, size: int) -> None:
        """Count ``size`` more bytes as held.

        Raises:
            Problem: 429, there is no room for them now.
        """
        if self.held + size > self.most:
            raise Problem(429, "the requests under way are too large together; try again later", retry_after=2.0)
        self.held += size


async def read_json(request: Request, ask: Callable[[Mapping[str, Any]], T], max_bytes: int = MAX_BYTES) -> T:
    """Return the result of ``ask`` for the body, a JSON object. ``ask`` must be pure: any thread may call it.

    Raises:
        Problem: as ``ask``; 400 if the body is not an object, 408 if it comes too slowly, 413 if it is too large, 415
            if it is compressed, 429 if all bodies under way are too large together.
        ClientDisconnect: the client has gone.
    """
    raw = await body_of(request, max_bytes)

    def work() -> T:
        return ask(parsed(raw))

    return work() if len(raw) < _SOON_PARSED else await asyncio.to_thread(work)


async def body_of(request: Request, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the body. If it was read before, it is ``raw`` in the request's state.

    Raises:
        Problem, ClientDisconnect: as ``read_json``.
    """
    if (raw := getattr(request.state, "raw", None)) is not None:
        return bytes(raw)
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise Problem(415, f"the body must be sent as it is, not with Content-Encoding: {encoding:.40}")
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _bounded(request, max_bytes)
    except TimeoutError:
        raise Problem(408, f"the body did not come within {READ_SECONDS:g} s") from None


async def read_request(request: Request, model: type[M], ask: Callable[[M], T]) -> T:
    """Return the result of ``ask`` for the body as a request of a model (``read_json``). The names of fields without
    effect go to the request's state.

    Raises:
        Problem, ClientDisconnect: as ``read_json``.
    """
    return await read_json(request, lambda body: ask(read(model, body, request.state.ignored)))


async def _bounded(request: Request, max_bytes: int) -> bytes:
    chunks = []
    async for chunk in request.stream():
        if request.state.size + len(chunk) > max_bytes:
            raise Problem(413, f"the body may have {max_bytes:,} bytes")
        request.state.bodies.add(len(chunk))
        request.state.size += len(chunk)
        chunks.append(chunk)
    return b"".join(chunks)


def parsed(raw: bytes) -> Mapping[str, Any]:
    """Return a body as a JSON object.

    Raises:
        Problem: 400, it is not one, or exceeds the bounds of `plain_json`.
    """
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    try:
        found = plain_json(text)
    except ValueError as error:
        raise Problem(400, f"the body {error}") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
    return found


# -- JSON of clients -------------------------------------------------------------------------------


_MAX_DEPTH = 64  # of nested lists and objects
_MAX_COMMAS = 1 << 20  # each value but the first has one before it; parsing 32 MB of them would block all others
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class _NoJson(ValueError):
    """JSON that only Python would read."""


def plain_json(text: str) -> Any:
    """Return the value of a text in JSON.

    Raises:
        ValueError: it is not JSON, or exceeds the bounds; the sentence lacks its subject.
    """
    if text.count(",") > _MAX_COMMAS:
        raise ValueError(f"may have {_MAX_COMMAS:,} commas")
    found = _parsed(text)
    if is_deeper(found, _MAX_DEPTH):
        raise ValueError("is nested too deeply")
    return _repaired(found) if _SURROGATE.search(text) else found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except (json.JSONDecodeError, _NoJson) as error:
        raise ValueError(f"is not JSON: {error}") from None
    except ValueError:  # Python raises it for an integer of over 4,300 digits
        raise ValueError("is not JSON: a number has too many digits") from None


def _repaired(found: Any, where: str = "") -> Any:
    """Return the value with U+FFFD for each half of a character. ``where``: its path in the body."""
    match found:
        case str(text):
            whole = whole_characters(text)
            if whole != text:
                log.info("half a character in %s is read as U+FFFD", where.lstrip(".") or "a text")
            return whole
        case dict():
            names = [whole_characters(key) for key in found]
            return {
                name: _repaired(value, f"{where}.{name:.60}") for name, value in zip(names, found.values(), strict=True)
            }
        case list():
            return [_repaired(value, f"{where}[{i}]") for i, value in enumerate(found)]
    return found


def _no_number(word: str) -> float:
    raise _NoJson(f"{word} is not a number in JSON")


def _finite(word: str) -> float:
    value = float(word)
    if math.isinf(value):
        raise _NoJson(f"{word:.40} is too large a number")
    return value
