"""A server's application without sockets: clients that read an answer as it comes, or whole, and the official ones."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import unquote

import httpx2 as httpx
from raw_http import Said
from valid_requests import JSON, Asked

Application = Callable[[MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Any]
SECONDS = 60.0  # more than anything here takes


def scope_of(asked: Asked) -> MutableMapping[str, Any]:
    path, _, query = asked.target.partition("?")
    named = {name.lower() for name, _ in asked.headers}
    more = () if "host" in named else (("Host", "localhost"),)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in (*more, *asked.headers)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
        "state": {},
    }


class Client:
    """Asks at once, on a running event loop, and stays until it leaves."""

    def __init__(self, application: Application, asked: Asked) -> None:
        self._bodies, self._gone = [asked.body], asyncio.Event()
        self._parts, self._start = asyncio.Queue[bytes](), asyncio.Queue[dict[str, Any]]()
        self._body = bytearray()
        self.task = asyncio.create_task(application(scope_of(asked), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start.put_nowait(dict(message))
        elif part := message.get("body"):
            self._body += part
            self._parts.put_nowait(part)

    async def part(self) -> bytes:
        return await asyncio.wait_for(self._parts.get(), SECONDS)

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, SECONDS)

    async def whole(self) -> Said:
        await self.task
        start = self._start.get_nowait()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
        return Said(start["status"], headers, bytes(self._body))


async def answer(application: Application, asked: Asked) -> Said:
    """What the application says. The client stays until it has."""
    return await Client(application, asked).whole()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in an event loop of its own, which it leaves in time."""

    @functools.wraps(test)
    def run(*args: Any, **more: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **more), SECONDS))

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def posted(path: str, body: Any, *headers: tuple[str, str], method: str = "POST") -> Asked:
    declared = () if "Content-Type" in dict(headers) else (JSON,)
    return Asked(method, path, (*declared, *headers), body if isinstance(body, bytes) else json.dumps(body).encode())


def told(application: Application, path: str, body: Any = None, *headers: tuple[str, str], method: str = "") -> Said:
    asked = (
        Asked(method or "GET", path, headers) if body is None else posted(path, body, *headers, method=method or "POST")
    )
    return asyncio.run(answer(application, asked))


class InMemory(httpx.BaseTransport):
    """What carries requests of official clients to an application. A stream comes when it is whole."""

    def __init__(self, application: Application) -> None:
        self.application = application

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
        asked = Asked(request.method, request.url.raw_path.decode("latin-1"), headers, request.read())
        said = asyncio.run(answer(self.application, asked))
        return httpx.Response(said.status, headers=said.headers, content=said.body)
