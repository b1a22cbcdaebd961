"""Streams: pings in silence, an end with the client, and nothing left behind."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import pytest
from asgi import in_loop, scope_of, until
from valid_requests import Asked

from splitinfer.server.gate import Gate, Sessions
from splitinfer.server.guard import Guard
from splitinfer.server.stream import COMMENT_PING, EventStream, event


class Client:
    """An ASGI server's side: what was sent, and a client that leaves, or does not read."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}
        self.has_ended = False
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.problem: Exception | None = None
        self.num_writes = 0  # under way

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.problem is not None:
            raise self.problem
        self.num_writes += 1
        await self.reads.wait()
        self.num_writes -= 1
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        elif message["more_body"]:
            self.sent.append(message["body"])
        else:
            self.has_ended = True

    async def get(self, source: AsyncGenerator[bytes, None], **options: Any) -> bool:
        scope: dict[str, Any] = {}
        await EventStream(source, **options)(scope, self.receive, self.send)  # type: ignore[arg-type]
        return "has_left" not in scope.get("state", {})


class Source:
    """Events, each after it was let go; whether the generator was closed."""

    def __init__(self, *events: bytes) -> None:
        self.events, self.go, self.is_closed = events, asyncio.Event(), False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for each in self.events:
                await self.go.wait()
                yield each
        finally:
            self.is_closed = True


@in_loop
async def test_what_fills_silence_may_be_made_when_it_is_sent():
    client, source, numbers = Client(), Source(b"end"), iter(range(10**6))
    getting = asyncio.create_task(client.get(source(), ping=lambda: b"%d" % next(numbers), ping_every=0.001))
    await until(lambda: len(client.sent) >= 3)
    source.go.set()
    await getting
    assert client.sent == [*(b"%d" % i for i in range(len(client.sent) - 1)), b"end"]
    assert (client.has_ended, source.is_closed) == (True, True)
    assert client.headers[b"content-type"].startswith(b"text/event-stream")


@in_loop
async def test_what_is_empty_is_silence():
    """Reasoning that is not shown comes all the time, and a client sees nothing of it."""
    client = Client()

    async def hidden() -> AsyncGenerator[bytes, None]:
        while client.sent.count(COMMENT_PING) < 3:
            await asyncio.sleep(0.004)
            yield b""
        yield b"a"

    await client.get(hidden(), ping_every=0.02)
    assert client.sent == [COMMENT_PING] * 3 + [b"a"]


@pytest.mark.parametrize("silent", [True, False])
@in_loop
async def test_a_client_that_leaves_ends_the_source_at_once(silent: bool):
    client, source = Client(), Source(*[b"a"] * 10**6)
    if not silent:
        source.go.set()
    getting = asyncio.create_task(client.get(source()))
    await until(lambda: silent or len(client.sent) > 5)
    client.leaves.set()
    assert not await getting
    assert (source.is_closed or silent, client.has_ended) == (True, False)


@in_loop
async def test_an_answer_is_whole_though_its_client_is_seen_to_leave_with_its_end():
    """A server says of a complete answer that nobody is there any more."""
    client, source = Client(), Source(b"a")
    source.go.set()
    send = client.send

    async def last(message: Any) -> None:
        await send(message)
        if client.has_ended:
            client.leaves.set()

    client.send = last  # type: ignore[method-assign]
    assert await client.get(source())


@pytest.mark.parametrize(("leaves", "status"), [(True, " 499, "), (False, " 200, ")])
@in_loop
async def test_the_log_says_that_the_client_has_gone(leaves: bool, status: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    client, source = Client(), Source(b"a")
    guard = Guard(EventStream(source(), ping_every=0.001), Gate(), Sessions())
    serving = asyncio.create_task(guard(scope_of(Asked("GET", "/", (), b"")), client.receive, client.send))
    await until(lambda: COMMENT_PING in client.sent)
    (client.leaves if leaves else source.go).set()
    await serving
    assert status in caplog.text


@in_loop
async def test_a_client_that_does_not_read_is_waited_for_without_pings_until_it_has_gone():
    """How long it is waited for is decided by its connection, which sees whether anything moves."""
    client, source = Client(), Source(*[b"a"] * 10**6)
    source.go.set()
    getting = asyncio.create_task(client.get(source(), ping_every=0.002))
    await until(lambda: len(client.sent) > 3)
    client.reads.clear()
    await asyncio.sleep(0.03)
    assert (getting.done(), client.num_writes) == (False, 1)
    client.leaves.set()  # as the connection's end says
    assert not await getting
    assert source.is_closed


@in_loop
async def test_a_lost_connection_is_no_error_but_a_fault_is():
    for problem in (OSError("gone"), ValueError("fault")):
        client, source = Client(), Source(b"a")
        source.go.set()
        client.problem = problem
        with nullcontext() if isinstance(problem, OSError) else pytest.raises(ValueError, match="fault"):
            await client.get(source())


@in_loop
async def test_whatever_happens_the_end_is_told():
    client, source, ends = Client(), Source(b"a"), list[str]()
    client.problem = OSError("gone before the first byte, so the source was never asked")
    await client.get(source(), end=lambda: ends.append("over"))
    assert (ends, source.is_closed) == (["over"], False)


def test_an_event_is_one_line_whatever_it_holds():
    assert event({"a": "x\ny\r\n"}) == b'data: {"a":"x\\ny\\r\\n"}\n\n'
    assert event({"a": "\ud800"}) == b'data: {"a":"?"}\n\n'
    assert event({}, "ping") == b"event: ping\ndata: {}\n\n"
