"""HTTP over raw sockets: what a server says to bytes that no client would send. `http.client` reads the answers."""

import http.client
import io
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass
class Exchange:
    """What came of what was sent. ``seconds``: until the last answer that was waited for, or the close. ``is_closed``:
    by the server. ``trouble``: what no server should do."""

    answers: list[Said] = field(default_factory=list)
    seconds: float = 0.0
    is_closed: bool = False
    trouble: str | None = None


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

    def exchange(self, raw: bytes, num_answers: int | None, patience: float = 0.3) -> Exchange:
        """Send bytes and read what comes. ``num_answers``: wait for so many; ``None``: for those that come, and
        ``patience`` seconds after the last byte the sending side is closed, upon which the server must end."""
        made, began = Exchange(), time.monotonic()

        def send() -> None:
            with suppress(OSError):
                self.socket.sendall(raw)
                if num_answers is None:
                    time.sleep(patience)
                    self.socket.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        method = "HEAD" if raw.lstrip().startswith(b"HEAD ") else "GET"
        while not made.is_closed and made.trouble is None and len(made.answers) != num_answers:
            self._next(made, method)
            made.is_closed |= bool(made.answers) and method == "HEAD" and num_answers is None
        made.seconds = time.monotonic() - began
        if made.trouble is None and not made.is_closed:  # what is sent next must not land within its last bytes
            sending.join(self.socket.gettimeout())
            if sending.is_alive():
                made.trouble = "the request is answered, but not read to its end"
        return made

    def _next(self, made: Exchange, method: str) -> None:
        try:
            if self.ends():
                made.is_closed = True
            else:
                made.answers.append(self.answer(method))
        except TimeoutError:
            made.trouble = f"nothing came for {self.socket.gettimeout():g} s"
        except (http.client.IncompleteRead, ConnectionError):  # closed, which a stream may be in its middle
            made.is_closed = True
        except (http.client.HTTPException, ValueError) as error:
            made.trouble = f"no answer of HTTP: {error!r:.120}"
