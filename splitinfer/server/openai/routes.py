"""OpenAI's routes: each reads a request, asks for an answer, and writes it."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.asking import answering
from splitinfer.server.health import model_document, models_document, named
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter
from splitinfer.server.openai.responses import InputRequest, ResponseRequest
from splitinfer.server.openai.responses_writer import ResponseWriter
from splitinfer.server.service import ApiRoute, Service


def openai_routes(service: Service) -> list[ApiRoute]:
    def chat_writer(asked: ChatRequest, name: str, request: Request, answer: Answer) -> ChatWriter:
        head = f"chatcmpl-{request.state.request_id}", int(time.time()), name, asked
        return ChatWriter(*head, service.token_text, service.fingerprint, lambda: answer.usage)

    def completion_writer(asked: CompletionRequest, name: str, request: Request, answer: Answer) -> CompletionWriter:
        head = f"cmpl-{request.state.request_id}", int(time.time()), name, asked
        more: Any = {"usage_now": lambda: answer.usage, "prompt_of": lambda choice: answer.choices[choice].request}
        return CompletionWriter(*head, service.token_text, service.fingerprint, **more)

    def response_writer(asked: ResponseRequest, name: str, request: Request, _answer: Answer) -> ResponseWriter:
        head = f"resp_{request.state.request_id}", int(time.time()), name, asked
        return ResponseWriter(*head, asked.said(service.llm.recommended_sampling), service.token_text)

    async def input_tokens(request: Request) -> Response:
        number = await service.num_tokens(request, InputRequest, InputRequest.chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    async def models(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(models_document([model_document(each, service.started) for each in service.offers()]))

    async def model(request: Request) -> Response:
        service.caller(request)
        return JSONResponse(model_document(named(service.offers(), request.path_params["name"]), service.started))

    chat_completions = answering(service, ChatRequest, chat_writer)
    completions = answering(service, CompletionRequest, completion_writer)
    responses = answering(service, ResponseRequest, response_writer)
    return [
        ApiRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
        ApiRoute("/chat/completions", chat_completions, methods=["POST"]),  # as mlx-lm's server has it, too
        ApiRoute("/v1/completions", completions, methods=["POST"]),
        ApiRoute("/v1/responses", responses, methods=["POST"]),
        ApiRoute("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]
