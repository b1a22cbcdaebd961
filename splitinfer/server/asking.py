"""The life of one request between HTTP and the engine: admitted, asked, read, and over, whichever way it ends."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from splitinfer.errors import QueueFull
from splitinfer.llm.request import Handling
from splitinfer.server.answer import Answer, Piece, submit
from splitinfer.server.ask import Ask
from splitinfer.server.keys import ApiKey
from splitinfer.server.meters.readings import OTHER
from splitinfer.server.pictures import with_marks
from splitinfer.server.problem import AGAIN, Problem
from splitinfer.server.service import Service, UnderWay
from splitinfer.server.spans import Arrival
from splitinfer.server.stream import COMMENT_PING, EventStream, Ping

log = logging.getLogger(__name__)

T = TypeVar("T")

PRIORITY, TIMEOUT = "x-splitinfer-priority", "x-splitinfer-timeout"
_MOST_PRIORITY = 100  # either way


@dataclass(slots=True)
class Asked:
    """An answer under way, and what ends with it."""

    answer: Answer
    open_things: ExitStack

    def streamed(self, source: AsyncGenerator[bytes, None], ping: Ping = COMMENT_PING) -> EventStream:
        """The answer as a stream, whose end is the request's."""
        end = self.open_things.pop_all().close
        return EventStream(source, ping=ping, end=end)


async def asked(service: Service, request: Request, key: ApiKey, ask: Ask, open_things: ExitStack) -> Asked:
    """Admit a request and ask the engine. What has to be undone in the end is in ``open_things``.

    Raises:
        Problem: it is not admitted, or a value is out of its range.
        SplitinferError: as ``LLM.submit``.
    """
    return await all_asked(service, request, key, [ask], open_things)


async def all_asked(
    service: Service, request: Request, key: ApiKey, asks: Sequence[Ask], open_things: ExitStack
) -> Asked:
    """Admit a request of several prompts, with as many choices each, and ask the engine.

    What has to be undone in the end is in ``open_things``. The client's end is noticed from here on, and the request is
    known by its id, also while it is tokenized; one that is cancelled then ends as soon as it begins.

    Raises:
        ClientDisconnect: the client has gone.
        Problem: it is not admitted, or a value is out of its range.
        SplitinferError: as ``LLM.submit``.
    """
    handling = handling_of(request)
    if service.logs_prompts:
        prompts = [with_marks(service.llm, ask.prompt)[0] for ask in asks]  # pictures are megabytes
        log.info("request %s asks %r", request.state.request_id, prompts)
    open_things.enter_context(service.admitted(key, sum(ask.num_choices for ask in asks)))
    under_way = UnderWay()
    open_things.enter_context(service.cancellable(request.state.request_id, key, under_way))
    try:
        answer = await until_gone(request, submit(service.llm, asks, handling, service.conversations))
    except QueueFull as error:
        raise service.turned_away(f"{error}") from error
    service.took_one()
    request.state.answer = answer
    open_things.enter_context(service.measured(answer, _arrival(request)))
    under_way.begins(answer)
    return Asked(answer, open_things)


def _arrival(request: Request) -> Arrival:
    state = request.state
    began = getattr(state, "began", None)  # the guard's
    route = getattr(state, "route", OTHER)
    return Arrival.of(route, state.request_id, time.monotonic() if began is None else began, request.headers)


def handling_of(request: Request) -> Handling:
    """How the headers want a request treated.

    Raises:
        Problem: 400, a header is not a number, or is out of range.
    """
    priority = _number(request, PRIORITY, -_MOST_PRIORITY, _MOST_PRIORITY) or 0
    return Handling(priority=int(priority), timeout=_number(request, TIMEOUT, 0.001, 1e6))


def _number(request: Request, name: str, low: float, high: float) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high or (name == PRIORITY and not value.is_integer()):
        raise Problem(400, f"the header {name} must be a number from {low:g} to {high:g}, not {text!r:.40}", param=name)
    return value


async def all_pieces(answer: Answer) -> list[Piece]:
    """The whole answer.

    Raises:
        Problem: 503, the pipeline has failed.
    """
    async with aclosing(answer.batches()) as batches:
        pieces = [piece async for batch in batches for piece in batch]
    failed = next((piece for piece in pieces if piece.finish_reason == "error"), None)
    if failed is not None:
        raise Problem(503, failed.error or "the pipeline has failed", retry_after=AGAIN)
    return pieces


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes.

    Raises:
        ClientDisconnect: the client has gone.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
