"""OpenAI's routes: each reads a request, asks for an answer, and writes it."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.health import model_document, models_document, named
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter, completions_of
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.openai.responses_writer import ResponseWriter
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream


def openai_routes(service: Service) -> list[ApiRoute]:
    async def chat_completions(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, ChatRequest, lambda one: chat_ask(one, service.model))
        head = f"chatcmpl-{request.state.request_id}", int(time.time())

        def writer_of(answer: Answer) -> ChatWriter:
            return ChatWriter(*head, shape, service.token_text, service.fingerprint, lambda: answer.usage)

        return await answered(service, request, key, [ask], writer_of, streams=shape.streams)

    async def completions(request: Request) -> Response | EventStream:
        key = service.caller(request)
        wanted = await read_request(request, CompletionRequest, lambda one: completions_of(one, service.model))
        head = f"cmpl-{request.state.request_id}", int(time.time())

        def writer_of(answer: Answer) -> CompletionWriter:
            more: Any = {"wanted": wanted, "prompt_of": lambda choice: answer.requests[choice]}
            more["usage_now"] = lambda: answer.usage
            return CompletionWriter(*head, wanted.shape, service.token_text, service.fingerprint, **more)

        return await answered(service, request, key, wanted.asks, writer_of, streams=wanted.shape.streams)

    async def responses(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, ResponseRequest, lambda one: response_ask(one, service.model))
        shape = shape.with_sampling(ask, service.llm.recommended_sampling)
        writer = ResponseWriter(f"resp_{request.state.request_id}", int(time.time()), shape, service.token_text)
        return await answered(service, request, key, [ask], lambda _: writer, streams=shape.streams)

    async def input_tokens(request: Request) -> Response:
        number = await service.num_tokens(request, InputRequest, InputRequest.chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    async def models(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(models_document([model_document(each, service.started) for each in service.offers()]))

    async def model(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(model_document(named(service.offers(), request.path_params["name"]), service.started))

    return [
        ApiRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
        ApiRoute("/chat/completions", chat_completions, methods=["POST"]),  # as mlx-lm's server has it, too
        ApiRoute("/v1/completions", completions, methods=["POST"]),
        ApiRoute("/v1/responses", responses, methods=["POST"]),
        ApiRoute("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]
