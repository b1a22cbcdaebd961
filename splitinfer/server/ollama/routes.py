"""Ollama's routes: each reads a request, asks for an answer, and writes it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, Name
from splitinfer.server.health import Offer, named
from splitinfer.server.ollama.models import listed, running, shown
from splitinfer.server.ollama.requests import Asked, ChatRequest, GenerateRequest, chat_ask, generate_ask
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import LINE_PING, NDJSON, EventStream, line

M = TypeVar("M", ChatRequest, GenerateRequest)
Handler = Callable[[Request], Awaitable[Response | EventStream]]

VERSION = "0.12.6"
"""Of Ollama, whose API this is; editors refuse versions before 0.6.4."""


class ShowRequest(Fields):
    model: Name | None = None
    name: Name | None = None  # as it was called before


def ollama_routes(service: Service) -> list[ApiRoute]:
    def answering(
        model: type[M], ask: Callable[[M, str], Asked]
    ) -> Callable[[Request], Awaitable[Response | EventStream]]:
        async def route(request: Request) -> Response | EventStream:
            key = service.caller(request)
            asked = await read_request(request, model, lambda one: ask(one, service.model))

            def writer_of(answer: Answer) -> OllamaWriter:
                return OllamaWriter(asked.model, asked.is_chat, request.state.began, lambda: answer.times[0])

            if asked.ask is None:  # the model is to be loaded, and it is
                return JSONResponse(writer_of(Answer(1)).loaded())
            events = _lines if asked.streams else None
            return await answered(
                service, request, key, [asked.ask], writer_of, events, lambda *_: LINE_PING, media_type=NDJSON
            )

        return route

    def listing(entry: Callable[[Offer], dict[str, Any]], *, loaded: bool) -> Handler:
        async def route(request: Request) -> Response:
            service.caller(request)
            offers = [each for each in service.offers() if each.layout is not None or not loaded]
            return JSONResponse({"models": await asyncio.to_thread(lambda: [*map(entry, offers)])})

        return route

    async def show(request: Request) -> Response:
        service.caller(request)
        name = await read_request(request, ShowRequest, lambda one: one.model or one.name)
        offer = named(service.offers(), name or service.model)
        return JSONResponse(await asyncio.to_thread(shown, offer, service.started))

    async def version(request: Request) -> Response:
        service.caller(request)
        return JSONResponse({"version": VERSION})

    tags = listing(lambda offer: listed(offer, service.started), loaded=False)
    return [
        ApiRoute("/api/chat", answering(ChatRequest, chat_ask), methods=["POST"]),
        ApiRoute("/api/generate", answering(GenerateRequest, generate_ask), methods=["POST"]),
        ApiRoute("/api/tags", tags, methods=["GET"]),
        ApiRoute("/api/ps", listing(running, loaded=True), methods=["GET"]),
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
