"""A client in a process of its own that reads raw sockets, so that it costs as little as a client can.

A line on standard input asks for several streams at once: ``{"port": ..., "requests": ["...", ...]}``, each request as
the text of its bytes. The answer has, for each, the seconds at which it was sent and what was read when.
"""

import contextlib
import selectors
import socket
import sys
import time
from typing import Any

from splitinfer.bench.shared.child_process import serve_commands

_SECONDS = 600.0  # for a stream to go on
_LAST = b"0\r\n\r\n"  # of a chunked body


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
    serve_commands(sys.stdout, _streams)
