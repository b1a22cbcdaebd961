"""The routes of all APIs: each reads a request, asks for an answer, and writes it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest
from splitinfer.server.anthropic.writer import MessageWriter
from splitinfer.server.asking import Handler, answering
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, Name
from splitinfer.server.health import Offer, model_document, models_document, named
from splitinfer.server.infill import InfillRequest, InfillWriter
from splitinfer.server.ollama import requests as ollama
from splitinfer.server.ollama.models import listed, running, shown
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter
from splitinfer.server.openai.responses import InputRequest, ResponseRequest
from splitinfer.server.openai.responses_writer import ResponseWriter
from splitinfer.server.service import ApiRoute, Service

C = TypeVar("C", CountRequest, InputRequest)

OLLAMAS_VERSION = "0.12.6"
"""The version of Ollama whose API this is; editors refuse versions before 0.6.4."""


def api_routes(service: Service) -> list[ApiRoute]:
    return [*_answering(service), *_counting(service), *_models(service), *_of_ollama(service)]


def _answering(service: Service) -> list[ApiRoute]:
    def chat_writer(asked: ChatRequest, name: str, request: Request, answer: Answer) -> ChatWriter:
        head = f"chatcmpl-{request.state.request_id}", int(time.time()), name, asked
        return ChatWriter(*head, service.token_text, answer, service.fingerprint)

    def completion_writer(asked: CompletionRequest, name: str, request: Request, answer: Answer) -> CompletionWriter:
        head = f"cmpl-{request.state.request_id}", int(time.time()), name, asked
        return CompletionWriter(*head, service.token_text, answer, service.fingerprint)

    def response_writer(asked: ResponseRequest, name: str, request: Request, _answer: Answer) -> ResponseWriter:
        head = f"resp_{request.state.request_id}", int(time.time()), name, asked
        return ResponseWriter(*head, asked.said(service.llm.recommended_sampling), service.token_text)

    def message_writer(asked: MessageRequest, name: str, request: Request, _answer: Answer) -> MessageWriter:
        return MessageWriter(f"msg_{request.state.request_id}", name, hides_thinking=asked.hides_thinking)

    def ollama_writer(asked: ollama.Generating, name: str, request: Request, answer: Answer) -> OllamaWriter:
        return OllamaWriter(name, asked, service.token_text, request.state.began, lambda: answer.choices[0].times)

    chat_completions = answering(service, ChatRequest, chat_writer)
    routes = {
        "/v1/chat/completions": chat_completions,
        "/chat/completions": chat_completions,  # mlx-lm's server has this path, too
        "/v1/completions": answering(service, CompletionRequest, completion_writer),
        "/v1/responses": answering(service, ResponseRequest, response_writer),
        "/v1/messages": answering(service, MessageRequest, message_writer),
        "/api/chat": answering(service, ollama.ChatRequest, ollama_writer),
        "/api/generate": answering(service, ollama.GenerateRequest, ollama_writer),
        "/infill": answering(service, InfillRequest, lambda _asked, name, *_: InfillWriter(name)),
    }
    return [ApiRoute(path, route, methods=["POST"]) for path, route in routes.items()]


def _counting(service: Service) -> list[ApiRoute]:
    """Return the routes that count a conversation's tokens and generate nothing."""

    def counting(model: type[C], **more: str) -> Handler:
        async def route(request: Request) -> Response:
            key, asked = service.caller(request), await read_request(request, model, model.chat)
            with service.admitted(key):
                seen, *_ = await service.reader.read(asked, request.state.size)
            return JSONResponse({**more, "input_tokens": len(seen.tokens)})

        return route

    responses = counting(InputRequest, object="response.input_tokens")
    return [
        ApiRoute("/v1/messages/count_tokens", counting(CountRequest), methods=["POST"]),
        ApiRoute("/v1/responses/input_tokens", responses, methods=["POST"]),
    ]


def _models(service: Service) -> list[ApiRoute]:
    async def models(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(models_document([model_document(each, service.started) for each in service.offers()]))

    async def model(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(model_document(named(service.offers(), request.path_params["name"]), service.started))

    return [
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]


class ShowRequest(Fields):
    model: Name | None = None
    name: Name | None = None  # its old name


def _of_ollama(service: Service) -> list[ApiRoute]:
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
        return JSONResponse({"version": OLLAMAS_VERSION})

    tags = listing(lambda offer: listed(offer, service.started), loaded=False)
    return [
        ApiRoute("/api/tags", tags, methods=["GET"]),
        ApiRoute("/api/ps", listing(running, loaded=True), methods=["GET"]),
        ApiRoute("/api/show", show, methods=["POST"]),
        ApiRoute("/api/version", version, methods=["GET"]),
    ]
