"""A port on which nobody listens, and which nobody else on this machine gets meanwhile.

A port that was just given back may be the next that another test is given, and then somebody listens there after all.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections. Who names it, and sets SO_REUSEADDR, may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
