"""Ollama's routes: each reads a request, asks for an answer, and writes it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, Name
from splitinfer.server.health import Offer, named
from splitinfer.server.ollama.models import listed, running, shown
from splitinfer.server.ollama.requests import Asked, ChatRequest, GenerateRequest, chat_ask, generate_ask
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream

M = TypeVar("M", ChatRequest, GenerateRequest)
Handler = Callable[[Request], Awaitable[Response | EventStream]]

VERSION = "0.12.6"
"""Of Ollama, whose API this is; editors refuse versions before 0.6.4."""


class ShowRequest(Fields):
    model: Name | None = None
    name: Name | None = None  # as it was called before


def ollama_routes(service: Service) -> list[ApiRoute]:
    def answering(model: type[M], ask: Callable[[M, str], Asked]) -> Handler:
        async def route(request: Request) -> Response | EventStream:
            key = service.caller(request)
            asked = await read_request(request, model, lambda one: ask(one, service.model))

            def writer_of(answer: Answer) -> OllamaWriter:
                return OllamaWriter(asked.model, asked.is_chat, request.state.began, lambda: answer.times[0])

            if asked.ask is None:  # the model is to be loaded, and it is
                return JSONResponse(writer_of(Answer(1)).loaded())
            return await answered(service, request, key, [asked.ask], writer_of, streams=asked.streams)

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
