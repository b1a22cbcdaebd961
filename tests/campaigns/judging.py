"""What must come of damaged bytes over a connection: answers in the form of their API, or its end."""

import http.client
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import raw_http
from raw_http import Said
from valid_requests import trouble_with

from .mutating import Sent

NO_HTTP = b"Invalid HTTP request received."


@dataclass
class Exchange:
    """What came of what was sent. ``seconds``: until the last answer that was waited for, or the close. ``is_closed``:
    by the server. ``trouble``: what no server should do."""

    answers: list[Said] = field(default_factory=list)
    seconds: float = 0.0
    is_closed: bool = False
    trouble: str | None = None


class Connection(raw_http.Connection):
    """One whose exchanges are judged."""

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


def verdict(sent: Sent, came: Exchange) -> str | None:
    """What is wrong with the answers to what was sent over one connection, if anything."""
    if came.trouble is not None:
        return came.trouble
    for i, said in enumerate(came.answers):
        if sent.is_head and "x-request-id" in said.headers:
            continue  # no body
        no_http = b"" if sent.is_head else NO_HTTP
        wrong = _judge(said, sent.paths_are_anthropic[min(i, len(sent.paths_are_anthropic) - 1)], no_http)
        if wrong is not None:
            return f"answer {i}: {wrong}"
    if sent.num_answers is None or len(came.answers) >= sent.num_answers:
        return None
    closes = bool(came.answers) and came.answers[-1].headers.get("connection") == "close"
    return None if closes else f"{len(came.answers)} answers of {sent.num_answers}, and closed"


def _judge(said: Said, is_anthropic: bool, no_http: bytes) -> str | None:
    """``no_http``: what a reader of the answer sees of the body that refuses bytes that are no HTTP."""
    if "x-request-id" not in said.headers:  # it reached no API: bytes that are no HTTP
        is_refusal = (said.status, said.headers.get("connection")) == (400, "close") and said.body == no_http
        return None if is_refusal else f"{said.status} without an id: {said.body[:80]!r}"
    return trouble_with(said.status, said.headers, said.json, is_anthropic=is_anthropic)
