"""A server's application without sockets: one request in, one answer out."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from mutating import Asked
from raw_http import Said

_Application = Callable[[MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Any]


def scope_of(asked: Asked) -> MutableMapping[str, Any]:
    """A request as uvicorn hands it on."""
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


async def answer(application: _Application, asked: Asked) -> Said:
    """What the application says. The client stays until it has."""
    coming = [{"type": "http.request", "body": asked.body, "more_body": False}]
    start: dict[str, Any] = {}
    body = bytearray()

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            body.extend(message.get("body", b""))

    await application(scope_of(asked), receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
    return Said(start["status"], headers, bytes(body))
