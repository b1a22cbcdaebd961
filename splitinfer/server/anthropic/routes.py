"""Anthropic's routes: each reads a request, asks for an answer, and writes it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest, message_ask
from splitinfer.server.anthropic.writer import Event, MessageWriter
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream, event

_PING = event({"type": "ping"}, "ping")  # comments do not count for these clients' watchdogs


def anthropic_routes(service: Service) -> list[ApiRoute]:
    async def messages(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, MessageRequest, lambda one: message_ask(one, service.model))
        writer = MessageWriter(f"msg_{request.state.request_id}", shape.model, hides_thinking=shape.hides_thinking)
        events = _events if shape.streams else None
        return await answered(service, request, key, [ask], lambda _: writer, events, lambda *_: _PING)

    async def count_tokens(request: Request) -> Response:
        key = service.caller(request)
        chat = await read_request(request, CountRequest, CountRequest.chat)
        with service.admitted(key):
            number = await service.reader.num_tokens(chat, request.state.size)
        return JSONResponse({"input_tokens": number})

    return [
        ApiRoute("/v1/messages", messages, methods=["POST"]),
        ApiRoute("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


async def _events(answer: Answer, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    yield _written([writer.start(answer.usage)]) + _PING
    last = Piece(0)
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            last = batch[-1]
            if written := _written([one for piece in batch for one in writer.events(piece)]):
                yield written
    if last.finish_reason == "error":
        yield event(Problem(last.status, last.error or "the pipeline has failed").anthropic(), "error")
    else:
        yield _written(writer.end(last, answer.usage))


def _written(events: list[Event]) -> bytes:
    return b"".join(event(data, name) for name, data in events)
