"""How the server listens: connections that say nothing, before it knows of them."""

import asyncio
import http.client
import socket
import ssl
import time
from contextlib import ExitStack

import pytest
import uvicorn

from splitinfer.server.connection import Doors
from splitinfer.server.listening import Listening
from splitinfer.server.patience import Limits
from splitinfer.server.running import Server, _InThread

AT_MOST = 20.0  # seconds, for what takes a tenth
DELAYED_ACK = 0.04  # seconds, at least, in which a system waits with an acknowledgement for something to send


def test_an_answer_on_a_kept_connection_waits_for_no_acknowledgement(server: Server):
    connection, seconds = http.client.HTTPConnection("127.0.0.1", server.port, AT_MOST), list[float]()
    for _ in range(20):
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert min(seconds[5:]) < DELAYED_ACK / 2, "the first few are acknowledged at once in any case"


def test_connections_are_counted_until_they_are_closed():
    with ExitStack() as sockets:
        listening = sockets.enter_context(Listening(socket.create_server(("127.0.0.1", 0)), most=2))

        def connect() -> socket.socket:
            return sockets.enter_context(socket.create_connection(listening.getsockname(), timeout=AT_MOST))

        def accept() -> socket.socket:
            return sockets.enter_context(listening.accept()[0])

        connect(), connect()
        first, second = accept(), accept()
        refused = connect()
        with pytest.raises(BlockingIOError):
            listening.accept()
        assert refused.recv(1) == b""
        first.close()
        connect()
        assert accept().fileno() > 0
        assert second.fileno() > 0


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_does_not_come_ends(says: bytes):
    """uvicorn says nothing of it, and asyncio's own bound is a minute."""

    async def main() -> None:
        doors = Doors(Limits())
        config = uvicorn.Config(lambda: None, http=doors.protocol(), ws="none", lifespan="off", log_config=None)
        config.load()
        config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server = _InThread(config, handshake=0.05)
        server.lifespan = config.lifespan_class(config)
        bound = Listening(socket.create_server(("127.0.0.1", 0)), most=1)
        await server.startup([bound])
        try:
            for _ in range(2):  # the first has made room for the second
                reader, writer = await asyncio.open_connection(*bound.getsockname())
                writer.write(says)
                assert await asyncio.wait_for(reader.read(), AT_MOST) == b""
                writer.close()
        finally:
            server.servers[0].close()
            bound.close()
        assert doors.num_open == 0

    asyncio.run(main())
