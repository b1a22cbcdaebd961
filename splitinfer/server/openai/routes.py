"""OpenAI's routes: each reads a request, asks for an answer, and writes it."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.health import model_document, models_document, named
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter, completions_of
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.openai.responses_writer import Event, ResponseWriter
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import COMMENT_PING, PROGRESS_EVERY, EventStream, event

_DONE = event("[DONE]")


def openai_routes(service: Service) -> list[ApiRoute]:
    async def chat_completions(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, ChatRequest, lambda one: chat_ask(one, service.model))
        answer_id, created = f"chatcmpl-{request.state.request_id}", int(time.time())
        return await answered(
            service,
            request,
            key,
            [ask],
            lambda answer: ChatWriter(
                answer_id,
                created,
                shape,
                service.token_text,
                fingerprint=service.fingerprint,
                usage_now=lambda: answer.usage,
            ),
            _events if shape.streams else None,
            _ping,
            PROGRESS_EVERY if shape.progress else None,
        )

    async def completions(request: Request) -> Response | EventStream:
        key = service.caller(request)
        wanted = await read_request(request, CompletionRequest, lambda one: completions_of(one, service.model))
        answer_id, created = f"cmpl-{request.state.request_id}", int(time.time())
        return await answered(
            service,
            request,
            key,
            wanted.asks,
            lambda answer: CompletionWriter(
                answer_id,
                created,
                wanted,
                service.token_text,
                service.fingerprint,
                usage_now=lambda: answer.usage,
                prompt_of=lambda choice: answer.requests[choice],
            ),
            _events if wanted.shape.streams else None,
            _ping,
            PROGRESS_EVERY if wanted.shape.progress else None,
        )

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
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]


def _ping(answer: Answer, writer: ChatWriter | CompletionWriter) -> bytes:
    """What is said in silence."""
    reading = answer.reading if writer.shape.progress else None
    return COMMENT_PING if reading is None else event(writer.progress_chunk(reading))


async def _events(answer: Answer, writer: ChatWriter | CompletionWriter) -> AsyncGenerator[bytes, None]:
    """A stream of chunks. That of an answer that fails has no end of its own: whoever looks for a reason to finish
    finds an error instead."""
    if isinstance(writer, ChatWriter):
        for choice in range(answer.num_choices):
            yield event(writer.first(choice))
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            failed = next((i for i, piece in enumerate(batch) if piece.finish_reason == "error"), len(batch))
            written = b"".join(writer.written(piece) for piece in batch[:failed])
            if failed < len(batch):
                last = batch[failed]
                problem = Problem(last.status, last.error or "the pipeline has failed")
                yield written + writer.written(replace(last, finish_reason=None)) + event(problem.openai()) + _DONE
                return
            yield written
    if (usage := writer.usage_chunk(answer.usage)) is not None:
        yield event(usage)
    yield _DONE


# -- responses -------------------------------------------------------------------------------------


def responses_routes(service: Service) -> list[ApiRoute]:
    async def responses(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, ResponseRequest, lambda one: response_ask(one, service.model))
        shape = shape.with_sampling(ask, service.llm.recommended_sampling)
        writer = ResponseWriter(f"resp_{request.state.request_id}", int(time.time()), shape, service.token_text)
        events = _response_events if shape.streams else None
        return await answered(service, request, key, [ask], lambda _: writer, events, lambda *_: _named(writer.ping()))

    async def input_tokens(request: Request) -> Response:
        key = service.caller(request)
        chat = await read_request(request, InputRequest, InputRequest.chat)
        with service.admitted(key):
            number = await service.reader.num_tokens(chat, request.state.size)
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
