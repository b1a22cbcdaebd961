"""OpenAI's routes: each reads a request, asks for an answer, and writes it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Piece
from splitinfer.server.asking import all_asked, all_pieces, asked, until_gone
from splitinfer.server.body import read_json
from splitinfer.server.openai.chat import chat_ask
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import completions_of
from splitinfer.server.openai.completions_writer import CompletionWriter, echoed
from splitinfer.server.openai.responses import counted_input, response_ask
from splitinfer.server.openai.responses_writer import Event, ResponseWriter
from splitinfer.server.problem import Problem
from splitinfer.server.reading import Answer
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service
from splitinfer.server.stream import EventStream, event

_DONE = event("[DONE]")


def openai_routes(service: Service) -> list[ApiRoute]:
    """The routes of OpenAI's API."""

    async def chat_completions(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        ask, shape = chat_ask(await read_json(request))
        writer = ChatWriter(f"chatcmpl-{request.state.request_id}", int(time.time()), shape, service.llm.token_bytes)
        with ExitStack() as open_things:
            under_way = await asked(service, request, key, ask, open_things)
            if shape.streams:
                return under_way.streamed(_chat_events(under_way.answer, writer, ask.num_choices))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def completions(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        wanted = completions_of(await read_json(request))
        token_text, answer_id = service.llm.token_bytes, f"cmpl-{request.state.request_id}"
        with ExitStack() as open_things:
            under_way = await all_asked(service, request, key, wanted.asks, open_things)
            echoes = echoed(wanted.asks, token_text) if wanted.echo else ()
            writer = CompletionWriter(answer_id, int(time.time()), wanted.shape, token_text, echoes)
            if wanted.shape.streams:
                return under_way.streamed(_completion_events(under_way.answer, writer))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def responses(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        ask, shape = response_ask(await read_json(request))
        writer = ResponseWriter(f"resp_{request.state.request_id}", int(time.time()), shape, service.llm.token_bytes)
        with ExitStack() as open_things:
            under_way = await asked(service, request, key, ask, open_things)
            if shape.streams:
                events = _response_events(under_way.answer, writer)
                return under_way.streamed(events, lambda: _named(writer.ping()))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def input_tokens(request: Request) -> Response:
        service.gate.caller(request.state.facts, service.sessions)
        chat = counted_input(await read_json(request))
        encode = service.llm.encode_chat
        tokens = await asyncio.to_thread(encode, chat.messages, tools=chat.tools, options=chat.options)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def models(request: Request) -> Response:
        service.gate.caller(request.state.facts, service.sessions)
        return JSONResponse({"object": "list", "data": [service.describe_model()]})

    async def model(request: Request) -> Response:
        service.gate.caller(request.state.facts, service.sessions)
        name = request.path_params["name"]
        if name != service.model:
            raise Problem(404, f"there is no model {name!r:.80} here, but {service.model!r}", code="model_not_found")
        return JSONResponse(service.describe_model())

    return [
        ApiRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
        ApiRoute("/v1/completions", completions, methods=["POST"]),
        ApiRoute("/v1/responses", responses, methods=["POST"]),
        ApiRoute("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]


async def _chat_events(answer: Answer, writer: ChatWriter, num_choices: int) -> AsyncGenerator[bytes, None]:
    for choice in range(num_choices):
        yield event(writer.first(choice))
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            if piece.finish_reason == "error":
                yield _failed(piece)
            yield b"".join(event(chunk) for chunk in writer.chunks(piece))
    if (usage := writer.usage_chunk(answer.usage)) is not None:
        yield event(usage)
    yield _DONE


async def _completion_events(answer: Answer, writer: CompletionWriter) -> AsyncGenerator[bytes, None]:
    for chunk in writer.first():
        yield event(chunk)
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            if piece.finish_reason == "error":
                yield _failed(piece)
            yield event(writer.chunk(piece))
    if (usage := writer.usage_chunk(answer.usage)) is not None:
        yield event(usage)
    yield _DONE


async def _response_events(answer: Answer, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    yield _named(*writer.start())
    last = Piece(0)
    async with aclosing(answer.pieces()) as pieces:
        async for last in pieces:
            if events := writer.events(last):
                yield _named(*events)
    yield _named(writer.end(last, answer.usage))


def _named(*events: Event) -> bytes:
    return b"".join(event(data, data["type"]) for data in events)


def _failed(piece: Piece) -> bytes:
    return event(Problem(503, piece.error or "the pipeline has failed").openai())
