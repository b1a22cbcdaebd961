"""OpenAI's routes for responses: each reads a request, asks for an answer, and writes it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Piece
from splitinfer.server.asking import all_pieces, asked, until_gone
from splitinfer.server.body import read_json
from splitinfer.server.fields import read
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.openai.responses_writer import Event, ResponseWriter
from splitinfer.server.preparing import num_tokens
from splitinfer.server.reading import Answer
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service
from splitinfer.server.stream import EventStream, event


def responses_routes(service: Service) -> list[ApiRoute]:
    """The routes of responses."""

    async def responses(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        ask, shape = await read_json(request, lambda body: response_ask(read(ResponseRequest, body), service.model))
        shape = shape.with_sampling(ask, service.llm.recommended_sampling)
        writer = ResponseWriter(f"resp_{request.state.request_id}", int(time.time()), shape, service.llm.token_bytes)
        with ExitStack() as open_things:
            under_way = await asked(service, request, key, ask, open_things)
            if shape.streams:
                events = _response_events(under_way.answer, writer)
                return under_way.streamed(events, lambda: _named(writer.ping()))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def input_tokens(request: Request) -> Response:
        key = service.gate.caller(request.state.facts, service.sessions)
        chat = await read_json(request, lambda body: read(InputRequest, body).chat())
        with service.admitted(key):
            number = await asyncio.to_thread(num_tokens, service.llm, chat, service.conversations)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    return [
        ApiRoute("/v1/responses", responses, methods=["POST"]),
        ApiRoute("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
    ]


async def _response_events(answer: Answer, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    yield _named(*writer.start())
    last = Piece(0)
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            last = batch[-1]
            if events := [one for piece in batch for one in writer.events(piece)]:
                yield _named(*events)
    yield _named(writer.end(last, answer.usage))


def _named(*events: Event) -> bytes:
    return b"".join(event(data, data["type"]) for data in events)
