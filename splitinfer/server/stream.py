"""Server-sent events that are never silent for long, and that end with their client.

Agents' watchdogs fire after 20 s without a byte, long before a prompt of 20,000 tokens is read. So after ``PING_EVERY``
seconds of silence the stream sends a ping, also while its request is queued or waits for a lost worker. Each API has
its own form of a ping: not all clients count comments.

Three tasks serve one response: one writes the events, one waits until the client leaves, and one watches the clock and
pings. The first to end ends the others. The source of the events is always closed, so an answer without a reader is
aborted at once. Most writes have one token, so a write starts no task and no timer: the watch looks at the writer's
notes. Connections that stay still are ended elsewhere (`connections`).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from splitinfer.common.json_text import dumps

PING_EVERY = 8.0  # seconds of silence; clients' limits begin at 10
PROGRESS_EVERY = 0.5  # if the client wants the progress of its prompt
_TURN = 16  # writes of one stream before others get their turn

EVENTS, NDJSON = "text/event-stream; charset=utf-8", "application/x-ndjson"
_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))  # proxies must not buffer
COMMENT_PING = b": ping\n\n"
LINE_PING = b" "  # the beginning of a line of JSON, which may begin with blanks


def response_start(media_type: str) -> dict[str, Any]:
    """Return the message that begins a stream."""
    headers = [(b"content-type", media_type.encode()), *_HEADERS]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, with null for numbers that are not finite: JSON does not have them."""
    return dumps(value, separators=(",", ":"))


class Document(JSONResponse):
    """A response of JSON, as ``json_line`` writes it."""

    def render(self, content: Any) -> bytes:
        return json_line(content).encode("utf-8", "replace")


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """Return one event. ``data``: an object, written as JSON on one line, or a word.

    >>> event({"a": "é"}, "message_stop"), event("[DONE]")
    (b'event: message_stop\\ndata: {"a":"\\xc3\\xa9"}\\n\\n', b'data: [DONE]\\n\\n')
    """
    line = data if isinstance(data, str) else json_line(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {line}\n\n".encode("utf-8", "replace")


def typed_event(data: Mapping[str, Any]) -> bytes:
    """Return one event whose name is its ``type``."""
    return event(data, data["type"])


def line(data: Mapping[str, Any]) -> bytes:
    """Return one line of NDJSON."""
    return f"{json_line(data)}\n".encode("utf-8", "replace")


class EventStream:
    """An ASGI response of the events from ``source``. ``end`` is called when the response is over, however it ended.
    If the client leaves early, ``scope["state"]`` gets ``has_left``."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        ping: Callable[[], bytes] = lambda: COMMENT_PING,
        ping_every: float = PING_EVERY,
        media_type: str = EVENTS,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._is_writing = source, False
        self._wrote_at = 0.0  # the end of the last write, in the loop's seconds
        self._ping, self._ping_every, self._media_type, self._end = ping, ping_every, media_type, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await self._serve(receive, send):
                scope.setdefault("state", {})["has_left"] = True
        finally:
            self._end()

    async def _serve(self, receive: Receive, send: Send) -> bool:
        """Return whether everything was sent. If not, the client has left."""
        async with aclosing(self._source):
            self._wrote_at = asyncio.get_running_loop().time()
            writing = asyncio.create_task(self._write_all(send))
            tasks = (writing, asyncio.create_task(left(receive)), asyncio.create_task(self._watch(send)))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            problem = None if task.cancelled() else task.exception()
            if problem is not None and not isinstance(problem, OSError):  # else the client has gone
                raise problem
        return not writing.cancelled() and writing.exception() is None

    async def _write_all(self, send: Send) -> None:
        await self._write(send, response_start(self._media_type))
        num_read = 0
        async for data in self._source:
            if data:  # hidden reasoning makes no data, which is silence
                await self._write(send, _body(data))
            num_read += 1
            if num_read % _TURN == 0:  # the source and the client may never have made this task wait
                await asyncio.sleep(0)
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send) -> None:
        """Send pings in silence, but not during a write: the client has not taken its data yet."""
        clock = asyncio.get_running_loop().time
        while True:
            silent = 0.0 if self._is_writing else clock() - self._wrote_at
            if silent >= self._ping_every:
                await self._write(send, _body(self._ping()))
            else:
                await asyncio.sleep(self._ping_every - silent)

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        """Send a message, and wait while the client does not read."""
        self._is_writing = True
        await send(message)
        self._wrote_at, self._is_writing = asyncio.get_running_loop().time(), False


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
