"""HTTP over raw sockets: what a server says to bytes that no client would send."""

import json
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_INFORMATION, _NO_CONTENT = 100, 204


@dataclass(frozen=True)
class Said:
    """One answer. ``headers``: names in lower case. ``body``: without the framing of chunks."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; ``None`` if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class AnswerReader:
    """Cuts a connection's bytes into answers. ``rest``: what is no whole answer yet. ``has_bodies``: false for answers
    to HEAD, which have a length and no body."""

    def __init__(self) -> None:
        self.rest, self.has_bodies = b"", True
        self._is_over = False

    def feed(self, data: bytes) -> list[Said]:
        """The answers that are whole with the next bytes; without any, the connection is over.

        Raises:
            ValueError: that is no answer.
        """
        self.rest, self._is_over = self.rest + data, not data
        found = []
        while (one := self._next()) is not None:
            if one.status // 100 * 100 != _INFORMATION:
                found.append(one)
        return found

    def _next(self) -> Said | None:
        head, separator, body = self.rest.partition(b"\r\n\r\n")
        if not separator:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        if version != "HTTP/1.1":
            raise ValueError(f"it answered {first!r:.80}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        got = self._body(int(status), body, headers)
        if got is None:
            return None
        text, self.rest = got
        return Said(int(status), headers, text)

    def _body(self, status: int, rest: bytes, headers: dict[str, str]) -> tuple[bytes, bytes] | None:
        """An answer's body and what is behind it; ``None`` while it is not whole."""
        if not self.has_bodies and "x-request-id" in headers:  # else it was not read as a request
            return b"", rest
        if "chunked" in headers.get("transfer-encoding", ""):
            return _chunks(rest)
        if "content-length" in headers or status // 100 * 100 == _INFORMATION or status == _NO_CONTENT:
            return _counted(rest, headers)
        return (rest, b"") if self._is_over else None  # to a client of HTTP/1.0


def _counted(body: bytes, headers: dict[str, str]) -> tuple[bytes, bytes] | None:
    size = int(headers.get("content-length", "0"))
    return (body[:size], body[size:]) if len(body) >= size else None


def _chunks(body: bytes) -> tuple[bytes, bytes] | None:
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end], 16)
        at = end + 2 + size + 2
        if len(body) < at:
            return None
        if size == 0:
            return b"".join(parts), body[at:]
        parts.append(body[end + 2 : end + 2 + size])
    return None


@dataclass
class Exchange:
    """What came of one connection. ``seconds``: until the last answer that was waited for, or the close.
    ``is_closed``: by the server. ``trouble``: what no server should do."""

    answers: list[Said] = field(default_factory=list)
    seconds: float = 0.0
    is_closed: bool = False
    was_reset: bool = False
    trouble: str | None = None


@dataclass
class Connection:
    """One connection to a server on this machine."""

    port: int
    seconds: float = 10.0
    _reader: AnswerReader = field(default_factory=AnswerReader)

    def __post_init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self.port), self.seconds)
        self._socket.setblocking(False)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def exchange(self, raw: bytes, num_answers: int | None, patience: float = 0.3) -> Exchange:
        """Send bytes and read what comes. ``num_answers``: wait for so many; ``None``: for those that come, and after
        ``patience`` seconds without any the sending side is closed, upon which the server must end."""
        made, began, left = Exchange(), time.monotonic(), memoryview(raw)
        self._reader.has_bodies = not raw.lstrip().startswith(b"HEAD ")
        last, is_shut = began, False
        while True:
            now = time.monotonic()
            made.seconds = now - began
            if made.is_closed and self._reader.rest and not is_shut and made.trouble is None:
                made.trouble = f"it closed in the middle of an answer: {self._reader.rest[:80]!r}"
            if made.is_closed or (num_answers is not None and len(made.answers) >= num_answers and not left):
                return made
            if now - last > self.seconds:
                made.trouble = f"nothing came for {self.seconds:g} s"
                return made
            if num_answers is None and not left and not self._reader.rest and now - last > patience:
                is_shut = is_shut or self._shut()
            readable, writable, _ = select.select([self._socket], [self._socket] if left else [], [], 0.05)
            if writable:
                left = self._send(left, made)
            if readable and self._receive(made):
                last = time.monotonic()

    def _shut(self) -> bool:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        return True

    def _send(self, left: memoryview, made: Exchange) -> memoryview:
        try:
            return left[self._socket.send(left[: 1 << 18]) :]
        except BlockingIOError:
            return left
        except OSError:  # the server has closed; what it said may still be there
            made.was_reset = True
            return left[:0]

    def _receive(self, made: Exchange) -> bool:
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            made.is_closed = made.was_reset = True
            return True
        made.is_closed = not data
        try:
            made.answers += self._reader.feed(data)
        except ValueError as error:
            made.is_closed, made.trouble = True, f"no answer of HTTP: {error}"
        return True
