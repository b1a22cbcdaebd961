"""A client that is in no library: it decides about every byte, when to read it, and when to go.

HTTP/1.1 over one socket of an event loop. What is not asked for is not read, so the server feels it.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

MOST_SECONDS = 120.0  # for the next byte, on a machine that is busy with other things
_PIECE = 65536
_SMALL = 4096  # of a slow reader's buffer, so that it is full soon


class Gone(Exception):
    """The other end has closed the connection."""


@dataclass
class Answer:
    """The head of an answer. ``size``: bytes of the body; ``None``: it comes in chunks."""

    status: int
    headers: Mapping[str, str]

    @property
    def size(self) -> int | None:
        return int(self.headers["content-length"]) if "content-length" in self.headers else None


@dataclass(frozen=True)
class Event:
    """An event of a stream. ``data``: text, or what it is in JSON; ``None``: a comment."""

    name: str
    data: Any


class Connection:
    """One connection, to ask one thing after the other."""

    def __init__(self, port: int, *, is_slow: bool = False) -> None:
        self._port, self._is_slow = port, is_slow
        self._found = bytearray()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()

    async def __aenter__(self) -> Self:
        self._socket.setblocking(False)
        if self._is_slow:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        self.close()

    def close(self) -> None:
        """Go, whatever is under way."""
        self._socket.close()

    def reset(self) -> None:
        """Go without a goodbye."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await self._loop.sock_sendall(self._socket, data)

    async def read(self, most: int = _PIECE) -> None:
        """Read up to so many bytes more.

        Raises:
            Gone: there will be none.
        """
        try:
            data = await asyncio.wait_for(self._loop.sock_recv(self._socket, most), MOST_SECONDS)
        except ConnectionError as error:
            raise Gone(f"{error}") from error
        if not data:
            raise Gone("the connection was closed")
        self._found += data

    async def _until(self, mark: bytes) -> bytes:
        """What comes up to a mark, without it."""
        while (at := self._found.find(mark)) < 0:
            await self.read()
        return self._take(at + len(mark))[: -len(mark)]

    async def _exactly(self, count: int) -> bytes:
        while len(self._found) < count:
            await self.read()
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._found[:count])
        del self._found[:count]
        return taken

    async def head(self) -> Answer:
        """The head of the next answer."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        return Answer(int(lines[0].split()[1]), {name.lower(): value for name, value in headers.items()})

    async def _pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if answer.size is not None:
            yield await self._exactly(answer.size)
            return
        while (size := int(await self._until(b"\r\n"), 16)) > 0:
            yield await self._exactly(size)
            await self._until(b"\r\n")
        await self._until(b"\r\n")

    async def body(self, answer: Answer) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self._pieces(answer)])

    async def events(self, answer: Answer) -> AsyncIterator[Event]:
        """The events of a stream as they come; to its end."""
        left = b""
        async for piece in self._pieces(answer):
            *whole, left = (left + piece).split(b"\n\n")
            for each in whole:
                yield _event(each.decode())
        assert not left, f"a stream ends in the middle of an event: {left!r}"


def _event(text: str) -> Event:
    fields = dict(line.partition(": ")[::2] for line in text.split("\n"))
    data = fields.get("data")
    return Event(fields.get("event", ""), data if data is None or data == "[DONE]" else json.loads(data))


def request(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as bytes. ``body``: in JSON; ``None``: it has none."""
    raw = b"" if body is None else json.dumps(body).encode()
    own = {"Host": "localhost", **(headers or {})}
    if body is not None:
        own |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items())]
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def get(port: int, path: str) -> tuple[int, Any]:
    """The status and the document of a path, on a connection of its own."""
    async with Connection(port) as connection:
        await connection.send(request("GET", path))
        answer = await connection.head()
        return answer.status, json.loads(await connection.body(answer))
