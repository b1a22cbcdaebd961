"""OpenAI's routes: each reads a request, asks for an answer, and writes it."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.asking import all_asked, all_pieces, asked, until_gone
from splitinfer.server.body import read_json
from splitinfer.server.fields import read
from splitinfer.server.health import models_document
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter, completions_of, echoed
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.openai.responses_writer import Event, ResponseWriter
from splitinfer.server.pictures import num_tokens
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream, event

_DONE = event("[DONE]")


def openai_routes(service: Service) -> list[ApiRoute]:
    """The routes of OpenAI's API."""

    async def chat_completions(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        ask, shape = await read_json(request, lambda body: chat_ask(read(ChatRequest, body), service.model))
        writer = ChatWriter(
            f"chatcmpl-{request.state.request_id}",
            int(time.time()),
            shape,
            service.llm.token_bytes,
            fingerprint=service.fingerprint,
        )
        with ExitStack() as open_things:
            under_way = await asked(service, request, key, ask, open_things)
            writer.usage_now = lambda: under_way.answer.usage
            if shape.streams:
                return under_way.streamed(_chat_events(under_way.answer, writer, ask.num_choices))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def completions(request: Request) -> Response | EventStream:
        key = service.gate.caller(request.state.facts, service.sessions)
        wanted = await read_json(request, lambda body: completions_of(read(CompletionRequest, body), service.model))
        token_text, answer_id = service.llm.token_bytes, f"cmpl-{request.state.request_id}"
        with ExitStack() as open_things:
            under_way = await all_asked(service, request, key, wanted.asks, open_things)
            echoes = echoed(wanted.asks, token_text) if wanted.echo else ()
            writer = CompletionWriter(answer_id, int(time.time()), wanted, token_text, echoes, service.fingerprint)
            writer.usage_now = lambda: under_way.answer.usage
            writer.prompt_of = lambda choice: under_way.answer.requests[choice]
            if wanted.shape.streams:
                return under_way.streamed(_completion_events(under_way.answer, writer))
            pieces = await until_gone(request, all_pieces(under_way.answer))
            return JSONResponse(writer.document(pieces, under_way.answer.usage))

    async def models(request: Request) -> Response:
        service.gate.caller(request.state.facts, service.sessions)
        return JSONResponse(models_document([service.describe_model()]))

    async def model(request: Request) -> Response:
        service.gate.caller(request.state.facts, service.sessions)
        name = request.path_params["name"]
        if name != service.model:
            raise Problem(404, f"there is no model {name!r:.80} here, but {service.model!r}", code="model_not_found")
        return JSONResponse(service.describe_model())

    return [
        ApiRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
        ApiRoute("/chat/completions", chat_completions, methods=["POST"]),  # as mlx-lm's server has it, too
        ApiRoute("/v1/completions", completions, methods=["POST"]),
        ApiRoute("/v1/models", models, methods=["GET"]),
        ApiRoute("/v1/models/{name:path}", model, methods=["GET"]),
    ]


async def _chat_events(answer: Answer, writer: ChatWriter, num_choices: int) -> AsyncGenerator[bytes, None]:
    for choice in range(num_choices):
        yield event(writer.first(choice))
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            written, has_failed = _up_to_failure(batch, writer.written)
            yield written
            if has_failed:
                return
    if (usage := writer.usage_chunk(answer.usage)) is not None:
        yield event(usage)
    yield _DONE


async def _completion_events(answer: Answer, writer: CompletionWriter) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            written, has_failed = _up_to_failure(batch, lambda piece: event(writer.chunk(piece)))
            yield written
            if has_failed:
                return
    if (usage := writer.usage_chunk(answer.usage)) is not None:
        yield event(usage)
    yield _DONE


def _failed(piece: Piece) -> bytes:
    """The end of a stream whose answer has none: whoever looks for a reason to finish finds an error instead."""
    return event(Problem(503, piece.error or "the pipeline has failed").openai()) + _DONE


def _up_to_failure(batch: Sequence[Piece], write: Callable[[Piece], bytes]) -> tuple[bytes, bool]:
    """The events of pieces, up to the one that has failed if one has; and whether one has."""
    written = b""
    for piece in batch:
        if piece.finish_reason == "error":
            return written + write(replace(piece, finish_reason=None)) + _failed(piece), True
        written += write(piece)
    return written, False


# -- responses -------------------------------------------------------------------------------------


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
            number = await num_tokens(service.llm, chat, service.conversations)
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
