"""What only a real socket shows: what is bounded, what is answered, who goes away, and that nothing stays."""

import asyncio
import http.client
import json
import logging
import select
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from processes import until
from raw_http import Connection
from stub_model import Model

from splitinfer.server.connections import Limits
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

AT_MOST = 20.0  # seconds, for what takes a few
QUICK = Limits(most=4, head=0.5, idle=1.0, unread=1.0)
CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4000, "ignore_eos": True}
HOST = "Host: localhost"


def request(path: str, *headers: str, method: str = "GET", body: bytes = b"", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def posts(*headers: str) -> bytes:
    return request(CHAT, HOST, "Content-Type: application/json", *headers, method="POST")


def asks_long(path: str = CHAT, **more: Any) -> bytes:
    return request(path, HOST, method="POST", body=json.dumps({**LONG, **more}).encode())


HEALTH, NOTHING = request("/health", HOST), request("/nothing", HOST)
UNWANTED = request("/nothing", HOST, "Content-Length: 30000000", method="POST")
CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Server]:
    server = Server(service, Listen(port=0, limits=QUICK))
    yield server
    server.close()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Connection]]:
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(Connection(server.port, AT_MOST, **how))
    until(lambda: (server.num_connections, server.service.num_running) == (0, 0), "all are gone", AT_MOST)


# -- who does not go on, and who goes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (HEALTH[:20], []),
        (HEALTH + NOTHING + HEALTH, [200, 404, 200]),  # idle
        (HEALTH + HEALTH[:20], [200]),
        (UNWANTED, [415]),
        (posts("Content-Length: 1" + "0" * 18), [413]),
    ],
)
def test_who_does_not_go_on_loses_the_connection(connect: Any, sent: bytes, statuses: list[int]):
    made = connect()
    made.socket.sendall(sent)
    assert [made.answer().status for _ in statuses] == statuses
    assert made.ends()


@pytest.mark.parametrize("head", [b"GET /", UNWANTED], ids=["head", "unwanted body"])
def test_a_byte_at_a_time_makes_no_difference(server: Server, connect: Any, head: bytes):
    made = connect()
    made.socket.sendall(head)
    with suppress(ConnectionError):
        for _ in range(1000):
            made.socket.sendall(b"x")
            time.sleep(0.02)
    assert server.num_connections == 0


def test_a_stream_that_is_not_read_ends(server: Server, connect: Any):
    """Before it is complete: the system keeps little of it for the client."""
    made = connect(buffer=2048)
    made.socket.sendall(asks_long(stream=True, logprobs=True, top_logprobs=5))
    until(lambda: server.service.num_running == 1, "it is under way", AT_MOST)
    until(lambda: server.num_connections == 0, "it is gone", 60.0)
    received = b""
    with suppress(ConnectionError):
        while read := made.socket.recv(1 << 16):
            received += read
    assert b"[DONE]" not in received
    assert len(received) < 500_000


def half_closed(made: Connection) -> None:
    made.socket.shutdown(1)


@pytest.mark.parametrize("leave", [lambda made: made.socket.close(), half_closed], ids=["closed", "half-closed"])
@pytest.mark.parametrize(("stream", "behind"), [(True, b""), (False, b""), (False, HEALTH * 50)])
def test_an_end_is_noticed_also_behind_further_requests(
    server: Server, connect: Any, leave: Any, stream: bool, behind: bytes
):
    made = connect()
    made.socket.sendall(asks_long(stream=stream) + behind)
    until(lambda: server.service.num_running == 1, "it is under way", AT_MOST)
    leave(made)
    until(lambda: server.service.num_running == 0, "it is over", AT_MOST)


# -- what is answered ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (request("/health", version="1.0"), 200, None),  # as load balancers look
        (request("http://localhost/health", "Host: proxy.example"), 200, None),
        (request("HTTP://attacker.example/health", HOST), 403, "host 'attacker.example' is not allowed"),
        (request("/health", "Host:"), 403, "host '' is not allowed"),
        (request("/health", HOST, "X: " + "x" * 66_000), 431, "the line and the headers of a request may have 65,536"),
        (request("/" + "x" * 66_000, HOST), 431, "the line and the headers of a request may have 65,536"),
        (posts("Content-Length: 33554433"), 413, "the body may have 33,554,432 bytes"),
        (posts("Content-Length: 2", CHUNKED) + b"0\r\n\r\n" + HEALTH, 400, "a Content-Length or a Transfer-Encoding"),
    ],
)
def test_a_request_is_answered_at_once(connect: Any, sent: bytes, status: int, words: str | None):
    made = connect()
    made.socket.sendall(sent)
    answer = made.answer()
    assert answer.status == status, answer
    assert words is None or words in answer.json["error"]["message"]
    if status == 400:  # nobody knows where the next request begins
        assert made.ends()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        request("/health"),
        request("/health", HOST, HOST),
        request("/health", HOST, "X: " + "x" * 500_000),
        posts("Content-Length: " + "9" * 5000),
        posts("Transfer-Encoding: gzip"),
        posts(CHUNKED) + b"ZZ\r\n",
        posts(CHUNKED) + b"5\r\nabcde\r\nZZ\r\n",  # the application has its request by then
    ],
)
def test_what_is_no_http_is_refused_in_plain_words(connect: Any, sent: bytes, caplog: pytest.LogCaptureFixture):
    made = connect()
    with suppress(ConnectionError):
        made.socket.sendall(sent)
        answer = made.answer()
        assert answer.status == 400
        assert answer.body == b"Invalid HTTP request received." or b"abcde" in sent
    assert made.ends()
    assert not [line for line in caplog.records if line.levelno > logging.INFO]


# -- too many --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HEALTH, UNWANTED], ids=["silent", "idle", "refused"])
def test_strangers_keep_nobody_out(connect: Any, sent: bytes):
    """Those who wait for a request, or were refused and go on sending, make room."""
    strangers = [connect() for _ in range(QUICK.most)]
    for each in strangers:
        each.socket.sendall(sent)
        if sent:
            each.answer()
    made = connect()
    made.socket.sendall(HEALTH)
    assert made.answer().status == 200


def test_strangers_who_never_ask_are_no_more_than_may_be():
    server = Server(Service(Model(), "demo"), Listen(port=0, limits=Limits(most=4)))  # type: ignore[arg-type]
    try:
        with ExitStack() as stack:
            sockets = [stack.enter_context(Connection(server.port)).socket for _ in range(12)]
            until(lambda: len(select.select(sockets, [], [], 0)[0]) == 8, "all but four are ended", AT_MOST)
            assert server.num_connections == 4
    finally:
        server.close()


def test_where_all_are_in_use_the_next_is_told_in_its_apis_words(server: Server, connect: Any):
    busy = [connect() for _ in range(QUICK.most)]
    for each in busy:
        each.socket.sendall(asks_long(stream=True))
    until(lambda: server.service.num_running == QUICK.most, "all are in use", AT_MOST)
    for path, kind in ((CHAT, "server_error"), ("/v1/messages", "overloaded_error")):
        made = connect()
        made.socket.sendall(asks_long(path))
        answer = made.answer()
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "2", "close")
        assert answer.json["error"]["type"] == kind
        assert "4 connections are open" in answer.json["error"]["message"]
        assert made.ends()
    assert server.service.num_running == QUICK.most, "nobody who is served is sent away"


class Thinking(Model):
    async def asubmit(self, *_given: Any, **_more: Any) -> None:
        await asyncio.Event().wait()


def test_closing_the_server_leaves_no_connection_and_no_thread(caplog: pytest.LogCaptureFixture):
    before = set(threading.enumerate())
    server = Server(Service(Thinking(), "demo"), Listen(port=0))  # type: ignore[arg-type]
    with Connection(server.port, AT_MOST) as busy, Connection(server.port, AT_MOST) as idle:
        busy.socket.sendall(asks_long())
        until(lambda: server.service.num_running == 1 and server.num_connections == 2, "one is busy", AT_MOST)
        server.close()
        assert idle.ends()
        with suppress(OSError, http.client.HTTPException):
            assert busy.answer().status >= 500
    assert set(threading.enumerate()) <= before
    assert (caplog.text, server.service.num_running) == ("", 0)


def test_packages_whose_insides_are_used_have_an_upper_bound():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    for name in ("uvicorn", "h11"):
        assert wanted[name].contains(metadata.version(name))
        assert not wanted[name].contains("99")
