"""Carries one request from HTTP to the engine: admits it, submits it, reads its answer, and ends it in every case."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from splitinfer.llm.request import Handling
from splitinfer.server.answer import Answer, Piece, Usage, Writer, submit, written
from splitinfer.server.ask import AnswerRequest, Ask
from splitinfer.server.body import read_request
from splitinfer.server.keys import ApiKey
from splitinfer.server.problem import Problem
from splitinfer.server.reading import with_marks
from splitinfer.server.service import Service
from splitinfer.server.stream import PING_EVERY, Document, EventStream, left

log = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W", bound=AnswerRequest)
Handler = Callable[[Request], Awaitable[Response | EventStream]]

PRIORITY, TIMEOUT = "x-splitinfer-priority", "x-splitinfer-timeout"
_MOST_PRIORITY = 100  # up or down


def answering(service: Service, model: type[W], writer_of: Callable[[W, str, Request, Answer], Writer]) -> Handler:
    """Return a route that answers requests of a model. ``writer_of``: returns the writer for a request's answer, under
    the name of the LLM."""

    async def route(request: Request) -> Response | EventStream:
        key = service.caller(request)
        wanted, asks = await read_request(request, model, lambda one: (one, one.asks()))
        name = wanted.model or service.model
        if not asks:
            return Document(writer_of(wanted, name, request, Answer(1)).document((), Usage(0)))
        with ExitStack() as open_things:
            answer = await asked(service, request, key, asks, open_things)
            writer = writer_of(wanted, name, request, answer)
            if wanted.stream:
                source, end = written(answer, writer), open_things.pop_all().close
                how: Any = {"ping_every": writer.ping_every, "media_type": writer.media_type}
                return EventStream(source, ping=lambda: writer.ping(answer), end=end, **how)
            pieces = await until_gone(request, all_pieces(answer))
            return Document(writer.document(pieces, answer.usage))

    return route


async def asked(service: Service, request: Request, key: ApiKey, asks: Sequence[Ask], open_things: ExitStack) -> Answer:
    """Admit a request and submit it to the engine.

    ``open_things`` undoes everything at the end. From here on the server notices if the client leaves, and knows the
    request by its id, even while it is tokenized; if it is cancelled then, it ends as soon as it begins.

    Raises:
        ClientDisconnect: the client has gone.
        Problem: the request is not admitted, or a value is out of its range.
        SplitinferError: as ``LLM.submit``, a full queue included.
    """
    handling, state = handling_of(request), request.state
    if service.logs_prompts:  # pictures are megabytes, so this takes long
        prompts = [(await asyncio.to_thread(with_marks, service.llm, ask.prompt))[0] for ask in asks]
        log.info("request %s asks %r", state.request_id, prompts)
    open_things.enter_context(service.admitted(key, sum(ask.num_choices for ask in asks)))
    answer = Answer(asks[0].num_choices, lambda: service.llm.health().failure)
    open_things.enter_context(service.cancellable(state.request_id, key, answer))

    async def submit_all() -> None:
        for ask in asks:
            await submit(service.reader, answer, ask, handling, state.size)

    await until_gone(request, submit_all())
    service.took_one()
    state.answer = answer
    open_things.callback(service.count, answer)
    if answer.is_cancelled:
        answer.abort()
    return answer


def handling_of(request: Request) -> Handling:
    """Return the priority and the deadline that the headers set.

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
    """Return the whole answer.

    Raises:
        Problem: 503, the pipeline has failed.
    """
    async with aclosing(answer.batches()) as batches:
        pieces = [piece async for batch in batches for piece in batch]
    failed = next((piece for piece in pieces if piece.finish_reason == "error"), None)
    if failed is not None:
        raise failed.problem
    return pieces


async def until_gone(request: Request, work: Awaitable[T], ping: Callable[[], Awaitable[None]] | None = None) -> T:
    """Return the result of ``work``. Cancel it when the client leaves. ``ping``: called in silence.

    Raises:
        ClientDisconnect: the client has gone.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(left(request.receive))
    every = None if ping is None else PING_EVERY
    try:
        while not working.done():
            await asyncio.wait((working, leaving), timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not working.done():
                raise ClientDisconnect
            if ping is not None and not working.done():
                await ping()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
