"""Ollama's routes: each reads a request, asks for an answer, and writes it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, Name
from splitinfer.server.health import named
from splitinfer.server.ollama.models import listed, running, shown
from splitinfer.server.ollama.requests import Asked, ChatRequest, GenerateRequest, chat_ask, generate_ask
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.spans import ChoiceTimes
from splitinfer.server.stream import LINE_PING, NDJSON, EventStream, line

VERSION = "0.12.6"
"""Of Ollama, whose API this is; editors refuse versions before 0.6.4."""


class ShowRequest(Fields):
    model: Name | None = None
    name: Name | None = None  # as it was called before


def ollama_routes(service: Service) -> list[ApiRoute]:
    async def respond(request: Request, asked: Asked) -> Response | EventStream:
        key, began = service.caller(request), request.state.began

        def writer_of(answer: Answer) -> OllamaWriter:
            return OllamaWriter(asked.model, asked.is_chat, began, lambda: answer.times[0])

        if asked.ask is None:  # whoever reads this is told that the model is loaded
            now = ChoiceTimes(began)
            return JSONResponse(OllamaWriter(asked.model, asked.is_chat, began, lambda: now).loaded())
        events = _lines if asked.streams else None
        return await answered(service, request, key, [asked.ask], writer_of, events, LINE_PING, NDJSON)

    async def chat(request: Request) -> Response | EventStream:
        service.caller(request)
        asked = await read_request(request, ChatRequest, lambda one: chat_ask(one, service.model))
        return await respond(request, asked)

    async def generate(request: Request) -> Response | EventStream:
        service.caller(request)
        asked = await read_request(request, GenerateRequest, lambda one: generate_ask(one, service.model))
        return await respond(request, asked)

    async def tags(request: Request) -> Response:
        service.caller(request)
        models = await asyncio.to_thread(lambda: [listed(each, service.started) for each in service.offers()])
        return JSONResponse({"models": models})

    async def ps(request: Request) -> Response:
        service.caller(request)
        loaded = [each for each in service.offers() if each.layout is not None]
        return JSONResponse({"models": await asyncio.to_thread(lambda: [running(each) for each in loaded])})

    async def show(request: Request) -> Response:
        service.caller(request)
        name = await read_request(request, ShowRequest, lambda one: one.model or one.name)
        offer = named(service.offers(), name or service.model)
        return JSONResponse(await asyncio.to_thread(shown, offer, service.started))

    async def version(request: Request) -> Response:
        service.caller(request)
        return JSONResponse({"version": VERSION})

    return [
        ApiRoute("/api/chat", chat, methods=["POST"]),
        ApiRoute("/api/generate", generate, methods=["POST"]),
        ApiRoute("/api/tags", tags, methods=["GET"]),
        ApiRoute("/api/ps", ps, methods=["GET"]),
        ApiRoute("/api/show", show, methods=["POST"]),
        ApiRoute("/api/version", version, methods=["GET"]),
    ]


async def _lines(answer: Answer, writer: OllamaWriter) -> AsyncGenerator[bytes, None]:
    last = Piece(0)
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            last = batch[-1]
            if written := b"".join(line(one) for piece in batch for one in writer.lines(piece)):
                yield written
    if last.finish_reason == "error":
        yield line({"error": last.error or "the pipeline has failed"})
    else:
        yield line(writer.last(last, answer.usage))
