"""Ollama's routes: each reads a request, asks for an answer, and writes it."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.asking import Handler, answering
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, Name
from splitinfer.server.health import Offer, named
from splitinfer.server.ollama.models import listed, running, shown
from splitinfer.server.ollama.requests import ChatRequest, GenerateRequest
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.service import ApiRoute, Service

VERSION = "0.12.6"
"""Of Ollama, whose API this is; editors refuse versions before 0.6.4."""


class ShowRequest(Fields):
    model: Name | None = None
    name: Name | None = None  # as it was called before


def ollama_routes(service: Service) -> list[ApiRoute]:
    def writer(asked: ChatRequest | GenerateRequest, name: str, request: Request, answer: Answer) -> OllamaWriter:
        return OllamaWriter(name, isinstance(asked, ChatRequest), request.state.began, lambda: answer.choices[0].times)

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
        ApiRoute("/api/chat", answering(service, ChatRequest, writer), methods=["POST"]),
        ApiRoute("/api/generate", answering(service, GenerateRequest, writer), methods=["POST"]),
        ApiRoute("/api/tags", tags, methods=["GET"]),
        ApiRoute("/api/ps", listing(running, loaded=True), methods=["GET"]),
        ApiRoute("/api/show", show, methods=["POST"]),
        ApiRoute("/api/version", version, methods=["GET"]),
    ]
