"""HTTP over raw sockets: what a server says to bytes that no client would send. `http.client` reads the answers."""

import http.client
import io
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


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


class _Shared(io.BufferedReader):
    """A connection's bytes, which one answer after the other reads and closes."""

    def close(self) -> None:
        pass

    def makefile(self, _mode: str) -> "_Shared":
        return self


class Connection:
    """One connection to a server on this machine. ``seconds``: for the next byte."""

    def __init__(self, port: int, seconds: float = 10.0, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(seconds)
        self.socket.connect(("127.0.0.1", port))
        self._file = _Shared(socket.SocketIO(self.socket, "r"))

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def answer(self, method: str = "GET") -> Said:
        """The next answer.

        Raises:
            OSError, http.client.HTTPException: there is none, or it is not whole.
        """
        response = http.client.HTTPResponse(self._file, method=method)  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Said(response.status, headers, response.read())

    def ends(self) -> bool:
        with suppress(ConnectionError):
            return self._file.peek(1) == b""
        return True
