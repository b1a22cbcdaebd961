"""Server-sent events that are never silent for long, and that end with their client.

Clients give up on silence: agents' watchdogs fire after 20 s without a byte, long before a prompt of 20,000 tokens is
read. So whenever nothing was sent for ``PING_EVERY`` seconds a ping is, from the first second on, also while a request
is queued or a lost worker is waited for. What a ping looks like is each API's matter: comments do not count for all.

Two tasks of one response: one writes what comes, and one waits until the client has gone. Whichever ends first ends the
other; the source of the events is closed in any case, so an answer that nobody reads is aborted at once. A write waits
while the client does not read, and no longer than ``WRITE_SECONDS``; meanwhile events wait in their own queue.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import Receive, Scope, Send

PING_EVERY = 8.0  # seconds of silence; clients' limits begin at 10
WRITE_SECONDS = 60.0  # for a client to take what is sent

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # proxies shall pass on what comes
}
COMMENT_PING = b": ping\n\n"
Ping = bytes | Callable[[], bytes]
"""What is sent in silence, or what makes it when it is sent."""


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One event. ``data``: an object, written as JSON on one line, or a word.

    >>> event({"a": "é"}, "message_stop"), event("[DONE]")
    (b'event: message_stop\\ndata: {"a":"\\xc3\\xa9"}\\n\\n', b'data: [DONE]\\n\\n')
    """
    line = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {line}\n\n".encode("utf-8", "replace")


class EventStream:
    """An ASGI response of events. ``source`` yields them, several in one if they come together. ``end`` is called when
    the response is over, however that was, also where the source was never asked for anything."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        ping: Ping = COMMENT_PING,
        ping_every: float = PING_EVERY,
        write_seconds: float = WRITE_SECONDS,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._headers = source, {**HEADERS, **(headers or {})}
        self._ping, self._ping_every, self._write_seconds = ping, ping_every, write_seconds
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client does."""
        try:
            await self._serve(receive, send)
        finally:
            self._end()

    async def _serve(self, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            writing = asyncio.create_task(self._write_all(send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (writing, leaving):
                    task.cancel()
                await asyncio.gather(writing, leaving, return_exceptions=True)
        problem = None if writing.cancelled() else writing.exception()
        if problem is not None and not isinstance(problem, OSError):  # else the client has gone, or does not read
            raise problem

    async def _write_all(self, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": headers})
        coming, clock = asyncio.ensure_future(anext(self._source)), asyncio.get_running_loop().time
        silent_since = clock()
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=max(0.0, silent_since + self._ping_every - clock()))
                try:
                    written = coming.result() if done else b""
                except StopAsyncIteration:
                    break
                if not written and clock() >= silent_since + self._ping_every:  # reasoning may come that is not shown
                    written = self._ping() if callable(self._ping) else self._ping
                if written:
                    await self._write(send, _body(written))
                    silent_since = clock()
                if done:
                    coming = asyncio.ensure_future(anext(self._source))
        finally:
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._write_seconds):
            await send(message)


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
