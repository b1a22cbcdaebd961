"""A client that reads raw sockets in a process of its own, so that it costs as little as a client can, and when each
token of a stream came, from what it read when.

A line on standard input asks for several streams at once: ``{"port": ..., "requests": ["...", ...]}``, each request as
the text of its bytes. The answer has, for each, the seconds at which it was sent and what was read when.

A token is there with the last of its characters. Some have none, and some only with the next ones, because half a
character is never shown; so a token counts as there when as much text is as it and all before it made. What is read
from the library and what is read from a socket are counted alike, so that both differ by nothing but their way.
"""

import contextlib
import json
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from splitinfer.bench.shared.child_process import serve_commands
from splitinfer.errors import ModelError

_SECONDS = 600.0  # for a stream to go on
_LAST = b"0\r\n\r\n"  # of a chunked body
Arrival = tuple[float, str]
"""Text, and the seconds at which it came."""


def token_times(arrivals: Sequence[Arrival], lengths: Sequence[int]) -> tuple[float, ...]:
    """The seconds at which each token was there. ``lengths``: characters of the text up to and with each token.

    Tokens before the first text count as there with it.

    >>> token_times([(1.0, "ab"), (2.0, "cd")], [0, 1, 2, 4])
    (1.0, 1.0, 1.0, 2.0)

    Raises:
        ModelError: the text is shorter.
    """
    there = list(accumulate(len(text) for _, text in arrivals))
    places = [bisect_left(there, max(1, length)) for length in lengths]
    if places and places[-1] == len(there):
        raise ModelError(f"a stream of {lengths[-1]} characters ended after {there[-1] if there else 0}")
    return tuple(arrivals[place][0] for place in places)


def events(reads: Iterable[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """The events in what a socket gave, each when it was whole: lines that begin with ``data: `` and hold JSON.

    What frames the body is on lines of its own, since the server writes whole events.
    """
    found, left = list[tuple[float, dict[str, Any]]](), b""
    for at, data in reads:
        *lines, left = (left + data).split(b"\n")
        found += [(at, json.loads(line[6:])) for line in lines if line.startswith(b"data: {")]
    return found


def chat_text(event: dict[str, Any]) -> str:
    """The text in a chunk of a chat completion."""
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def message_text(event: dict[str, Any]) -> str:
    """The text in an event of a message."""
    return str((event.get("delta") or {}).get("text") or "")


def arrivals_of(reads: Iterable[tuple[float, bytes]], text_of: Callable[[dict[str, Any]], str]) -> list[Arrival]:
    """The text in what a socket gave."""
    return [(at, text) for at, event in events(reads) if (text := text_of(event))]


def _streams(options: dict[str, Any]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        streams = []
        for _ in options["requests"]:
            connected = socket.create_connection(("127.0.0.1", options["port"]), timeout=_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams.append(stack.enter_context(connected))
        sent = []
        reads: list[list[tuple[float, bytes]]] = [[] for _ in streams]
        ends = [b""] * len(streams)
        for number, (connected, request) in enumerate(zip(streams, options["requests"], strict=True)):
            sent.append(time.monotonic())
            connected.sendall(request.encode())
            selector.register(connected, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(_SECONDS)
            if not ready:
                raise TimeoutError(f"no stream went on for {_SECONDS:g} s")
            for key, _ in ready:
                data = streams[key.data].recv(1 << 16)
                reads[key.data].append((time.monotonic(), data))
                ends[key.data] = (ends[key.data] + data)[-len(_LAST) :]
                if not data or ends[key.data] == _LAST:
                    selector.unregister(key.fileobj)
    texts = [[(at, data.decode("utf-8", "surrogateescape")) for at, data in each] for each in reads]
    return {"sent": sent, "reads": texts}


if __name__ == "__main__":
    serve_commands(_streams)
