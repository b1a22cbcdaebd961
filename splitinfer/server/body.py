"""Reads a request's body: bounded in bytes and in time, alone and with those of others; JSON in UTF-8.

JSON can name half a character (a lone surrogate, ``"\\ud800"``), and Python's texts can hold it, but nothing that is
sent or tokenized can. It is refused here, once for everything behind.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from splitinfer.server.problem import Problem

MAX_BYTES = 32 << 20  # a conversation that fills a context of a million tokens has about 5 MB
MAX_TOGETHER = 16 * MAX_BYTES  # of all requests under way: a body is in memory until its answer is over
READ_SECONDS = 30.0  # for a client to send it
_MAX_DEPTH = 64  # of lists and objects in each other
_MAX_COMMAS = 1 << 20  # each value but the first has one before it; a parser of 32 MB of them holds everybody up
_SOON_PARSED = 1 << 17  # bytes that take about a millisecond
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(slots=True)
class Bodies:
    """What the bodies of all requests under way take, in bytes."""

    most: int = MAX_TOGETHER
    held: int = 0


@dataclass(slots=True)
class Held:
    """One request's part of it, which it gives back in the end."""

    bodies: Bodies
    size: int = 0

    def add(self, size: int) -> None:
        """As many more bytes have come.

        Raises:
            Problem: 429, there is no room for them now.
        """
        if self.bodies.held + size > self.bodies.most:
            raise Problem(429, "the requests under way are too large together; try again later", retry_after=2.0)
        self.size, self.bodies.held = self.size + size, self.bodies.held + size

    def give_back(self) -> None:
        """The request is over."""
        self.size, self.bodies.held = 0, self.bodies.held - self.size


async def read_json(request: Request, max_bytes: int = MAX_BYTES, seconds: float = READ_SECONDS) -> Mapping[str, Any]:
    """The body as a JSON object.

    Raises:
        Problem: 400 if it is none, 408 if it came too slowly, 413 if it is too large, 415 if it is compressed, 429 if
            those under way are too large together.
        ClientDisconnect: the client has gone.
    """
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise Problem(415, f"the body must be sent as it is, not with Content-Encoding: {encoding:.40}")
    try:
        async with asyncio.timeout(seconds):
            raw = await _bounded(request, max_bytes)
    except TimeoutError:
        raise Problem(408, f"the body did not come within {seconds:g} s") from None
    return parsed(raw) if len(raw) < _SOON_PARSED else await asyncio.to_thread(parsed, raw)


async def _bounded(request: Request, max_bytes: int) -> bytes:
    too_large = Problem(413, f"the body may have {max_bytes:,} bytes")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and len(length) < 19 and int(length) > max_bytes:
        raise too_large
    chunks, held = [], request.state.body
    async for chunk in request.stream():
        if held.size + len(chunk) > max_bytes:
            raise too_large
        held.add(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def parsed(raw: bytes) -> Mapping[str, Any]:
    """A body as a JSON object; NaN and infinity are no JSON, and half a character is no text.

    Raises:
        Problem: 400, it is something else.
    """
    if raw.count(b",") > _MAX_COMMAS:
        raise Problem(400, f"the body may have {_MAX_COMMAS:,} commas")
    try:
        text = raw.decode("utf-8")
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
    if _depth(found) > _MAX_DEPTH:
        raise Problem(400, "the body is nested too deeply")
    if _SURROGATE.search(text) and not _is_text(found):
        raise Problem(400, "the body has half a character, which no text can hold")
    return found


def _is_text(found: Any) -> bool:
    """Whether all texts in it can be written: the pattern alone also finds the halves of whole characters."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number in JSON")


def _finite(word: str) -> float:
    value = float(word)
    if math.isinf(value):
        raise ValueError(f"{word:.40} is too large a number")
    return value


def _depth(value: Any) -> int:
    """How deeply lists and objects lie in each other; as deep as the limit is enough to know."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        below = [one for each in level for one in _inside(each)]
        level, depth = below, depth + 1
    return depth


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


__all__ = ["MAX_BYTES", "READ_SECONDS", "Bodies", "ClientDisconnect", "Held", "parsed", "read_json"]
