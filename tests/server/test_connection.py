"""Connections over real sockets, without a model: what is bounded, what is answered, and that nothing stays."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from splitinfer.server.body import read_json
from splitinfer.server.connection import Doors
from splitinfer.server.gate import Gate
from splitinfer.server.guard import Guard
from splitinfer.server.patience import Limits
from splitinfer.server.problem import Problem
from splitinfer.server.sessions import Sessions
from splitinfer.server.stream import EventStream

AT_MOST = 20.0  # seconds, for what takes a tenth
QUICK = Limits(most=4, spare=2, head=1.0, idle=1.0, rest=1.0, unsent=1.0, every=0.02)
PATIENT = Limits(most=4, spare=2, head=60.0, idle=60.0, rest=60.0, unsent=60.0, every=0.02)
GET = b"GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n"
MANY = b"x" * (1 << 20)
SECRET = "words of a prompt"


class Served:
    """A server of four routes, and what it has done."""

    def __init__(self, limits: Limits) -> None:
        self.doors, self.under_way, self.gone = Doors(limits), 0, 0
        self._made = socket.create_server(("127.0.0.1", 0))
        guard = Guard(self._route, Gate(), Sessions())

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (self._faulty if scope["path"] == "/faulty" else guard)(scope, receive, send)

        config = uvicorn.Config(app, http=self.doors.protocol(), ws="none", lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._made])), daemon=True)
        self._thread.start()

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        self.under_way += 1
        try:
            await {"/quick": self._quick, "/large": self._large, "/body": self._body, "/slow": self._slow,
                   "/stream": self._stream, "/half": self._half,
                   "/refused": self._refused}[scope["path"]](scope, receive, send)  # fmt: skip
        finally:
            self.under_way -= 1

    async def _quick(self, *asgi: Any) -> None:
        await JSONResponse({"it": "is"})(*asgi)

    async def _large(self, *asgi: Any) -> None:
        await JSONResponse({"it": "x" * (16 << 20)})(*asgi)

    async def _body(self, *asgi: Any) -> None:
        found = await read_json(Request(*asgi), dict, seconds=0.3)
        await JSONResponse(found)(*asgi)

    async def _slow(self, scope: Any, receive: Any, send: Any) -> None:
        """An answer that takes until its client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone += 1

    async def _stream(self, *asgi: Any) -> None:
        async def source() -> Any:
            while True:
                yield MANY

        await EventStream(source())(*asgi)

    async def _half(self, _scope: Any, _receive: Any, send: Any) -> None:
        """An answer that ends in the middle."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": MANY * 16, "more_body": True})

    async def _refused(self, *asgi: Any) -> None:
        raise Problem(401, "no")

    async def _faulty(self, scope: Any, receive: Any, send: Any) -> None:
        """A mistake of the server's own."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError(SECRET)

    @property
    def num_open(self) -> int:
        return self.doors.num_open

    def connect(self) -> socket.socket:
        return socket.create_connection(self._made.getsockname()[:2], timeout=AT_MOST)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(AT_MOST)
        self._made.close()


@contextmanager
def served(limits: Limits = QUICK) -> Iterator[Served]:
    server = Served(limits)
    try:
        until(lambda: server._server.started)
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        running: Served = request.getfixturevalue("server")
        until(lambda: (running.num_open, running.under_way) == (0, 0))


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + AT_MOST
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def head_of(made: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The status and the headers of an answer, and what came with them of its body."""
    found = b""
    while b"\r\n\r\n" not in found and (piece := made.recv(65536)):
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


def answer(made: socket.socket) -> tuple[int, dict[str, str], Any]:
    """A whole answer in JSON."""
    status, headers, body = head_of(made)
    while len(body) < int(headers["content-length"]):
        body += made.recv(65536)
    return status, headers, json.loads(body)


def ends(made: socket.socket) -> bool:
    """Whether the other end closes the connection, and says nothing before."""
    with suppress(ConnectionResetError):
        return made.recv(1) == b""
    return True


# -- what does not come ----------------------------------------------------------------------------


def test_a_connection_that_asks_nothing_is_closed(server: Served):
    with server.connect() as made:
        assert ends(made)


def test_a_head_that_comes_a_byte_at_a_time_is_answered_with_408(server: Served):
    with server.connect() as made:
        made.sendall(b"GET /quick HT")
        give_up = time.monotonic() + AT_MOST
        made.settimeout(0.01)
        while time.monotonic() < give_up:
            with suppress(TimeoutError):
                made.sendall(b"T")
                if made.recv(1, socket.MSG_PEEK):
                    break
        made.settimeout(AT_MOST)
        status, headers, body = answer(made)
        assert (status, headers["connection"]) == (408, "close")
        assert body["error"]["message"] == "the request did not come within 1 s"


def test_the_next_head_has_the_same_bound(server: Served):
    with server.connect() as made:
        made.sendall(GET + GET[:20])
        assert answer(made)[0] == 200
        assert answer(made)[0] == 408
        assert ends(made)


def test_between_two_requests_a_connection_is_closed_without_a_word(server: Served):
    with server.connect() as made:
        for _ in range(3):
            made.sendall(GET)
            assert answer(made)[0] == 200
        assert ends(made)


def test_a_body_that_does_not_come_is_answered_with_408(server: Served):
    with server.connect() as made:
        made.sendall(post("/body", 100) + b'{"a":')
        status, _, body = answer(made)
        assert (status, body["error"]["message"]) == (408, "the body did not come within 0.3 s")
        assert ends(made), "and what is left of it is not awaited for ever"


def test_a_body_that_nobody_wants_is_thrown_away_for_a_while_only(server: Served):
    with server.connect() as made:
        made.sendall(post("/refused", 10**9))
        assert answer(made)[0] == 401
        until(lambda: server.num_open == 0 or not made.sendall(b"x" * 1000))


def post(path: str, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"{head}\r\n\r\n".encode()


# -- what is not taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/large", "/stream"])
def test_who_does_not_read_loses_the_connection(server: Served, path: str):
    with server.connect() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.sendall(GET.replace(b"/quick", path.encode()))
        until(lambda: server.num_open == 1)
        until(lambda: (server.num_open, server.under_way) == (0, 0))


def test_an_answer_that_is_given_up_takes_its_connection_with_it():
    """Closing it would wait until the client has read what was written."""
    with served(replace(QUICK, unsent=1000.0)) as server, server.connect() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.sendall(GET.replace(b"/quick", b"/half"))
        assert made.recv(1, socket.MSG_PEEK)
        until(lambda: server.num_open == 0)


def test_who_asks_on_and_on_and_never_reads_loses_the_connection(server: Served):
    with server.connect() as made:
        made.sendall(GET.replace(b"/quick", b"/large") * 20)
        until(lambda: server.num_open == 1)
        until(lambda: server.num_open == 0)


def test_who_reads_slowly_gets_it_all(server: Served):
    """As long as something is taken within each bound, an answer may take many of them."""
    with server.connect() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        made.sendall(GET.replace(b"/quick", b"/large"))
        _, headers, body = head_of(made)
        size, began = len(body), time.monotonic()
        while size < int(headers["content-length"]):
            size += len(made.recv(1 << 20))
            time.sleep(0.08)
        assert time.monotonic() - began > QUICK.unsent


# -- who goes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"\r\n", GET, GET * 50])
def test_an_end_is_noticed_also_behind_further_requests(server: Served, more: bytes):
    before = server.gone
    with server.connect() as made:
        made.sendall(GET.replace(b"/quick", b"/slow"))
        until(lambda: server.under_way == 1)
        made.sendall(more)
        time.sleep(0.02)  # so that it is read before the end comes
    until(lambda: server.gone == before + 1)


def test_further_requests_are_carried_out_in_order():
    refused, found = GET.replace(b"/quick", b"/refused"), b""
    with served(PATIENT) as server, server.connect() as made:
        made.sendall(GET + refused + GET + GET + refused)
        while found.count(b"HTTP/1.1 ") < 5 and (piece := made.recv(65536)):
            found += piece
    assert [int(each.split()[0]) for each in found.split(b"HTTP/1.1 ")[1:]] == [200, 401, 200, 200, 401]


def test_a_fault_ends_the_connection_and_the_log_has_where_but_not_what(
    server: Served, caplog: pytest.LogCaptureFixture
):
    with server.connect() as made:
        made.sendall(GET.replace(b"/quick", b"/faulty"))
        assert head_of(made)[0] == 200
        assert ends(made)
    until(lambda: server.under_way == 0)
    assert "ValueError" in caplog.text
    assert "_faulty" in caplog.text
    assert SECRET not in caplog.text


# -- what is no request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (80 << 10), 431),
        (b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"POST /body HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_json(server: Served, sent: bytes, status: int):
    with server.connect() as made:
        made.sendall(sent)
        found, headers, body = answer(made)
        assert (found, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
        assert body["error"]["message"].startswith("this is no request of HTTP/1.1: ")
        assert ends(made)


def test_a_damaged_body_behind_an_answer_ends_the_connection(server: Served):
    with server.connect() as made:
        made.sendall(
            b"POST /refused HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"
        )
        assert answer(made)[0] == 401
        made.sendall(b"ZZ\r\n")
        assert ends(made)


# -- too many --------------------------------------------------------------------------------------


def test_one_that_waits_makes_room(server: Served):
    waiting = [server.connect() for _ in range(QUICK.most)]
    until(lambda: server.num_open == QUICK.most)
    with server.connect() as made:
        assert ends(waiting[0])
        made.sendall(GET)
        assert answer(made)[0] == 200
    for each in waiting:
        each.close()


def test_one_that_makes_room_and_does_not_read_is_not_forgotten():
    with served(replace(QUICK, unsent=1.0)) as server, ExitStack() as clients:
        for _ in range(QUICK.most):
            unread = clients.enter_context(server.connect())
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.sendall(GET.replace(b"/quick", b"/large"))
            assert unread.recv(1, socket.MSG_PEEK)
        for _ in range(QUICK.most):
            clients.enter_context(server.connect())
        connections = server._server.server_state.connections
        until(lambda: len(connections) <= QUICK.most + QUICK.spare)
        until(lambda: not connections)


def test_where_all_are_in_use_the_next_is_told_in_json(server: Served):
    busy = [server.connect() for _ in range(QUICK.most)]
    for each in busy:
        each.sendall(GET.replace(b"/quick", b"/slow"))
    until(lambda: server.under_way == QUICK.most)
    for path, kind in (("/v1/chat/completions", "server_error"), ("/v1/messages", "overloaded_error")):
        with server.connect() as made:
            made.sendall(GET.replace(b"/quick", path.encode()))
            status, headers, body = answer(made)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "2", "close")
            assert body["error"]["type"] == kind
            assert "4 connections are open" in body["error"]["message"]
            assert headers["x-request-id"]
            assert ends(made)
    flood = [server.connect() for _ in range(3 * QUICK.most)]
    until(lambda: server.num_open <= QUICK.most + QUICK.spare)
    assert server.under_way == QUICK.most, "nobody who is served is sent away"
    for each in (*busy, *flood):
        each.close()


def test_who_was_refused_makes_room_though_it_goes_on_sending(server: Served):
    """Strangers without a key cannot keep others out."""
    strangers = [server.connect() for _ in range(QUICK.most)]
    for each in strangers:
        each.sendall(post("/refused", 10**9))
        assert answer(each)[0] == 401
    with server.connect() as made:
        made.sendall(GET)
        assert answer(made)[0] == 200
    for each in strangers:
        each.close()


def test_closing_the_server_leaves_no_connection_and_no_thread(caplog: pytest.LogCaptureFixture):
    before = set(threading.enumerate())
    with served(Limits()) as running:
        busy, idle = running.connect(), running.connect()
        busy.sendall(GET.replace(b"/quick", b"/slow"))
        until(lambda: running.under_way == 1 and running.num_open == 2)
    assert ends(busy)
    assert ends(idle)
    assert set(threading.enumerate()) <= before
    assert caplog.text == ""
    assert running.under_way == 0
    busy.close()
    idle.close()
