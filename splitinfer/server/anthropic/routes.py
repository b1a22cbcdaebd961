"""Anthropic's routes: each reads a request, asks for an answer, and writes it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.anthropic.messages import CountRequest, MessageRequest, message_ask
from splitinfer.server.anthropic.writer import MessageWriter
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream


def anthropic_routes(service: Service) -> list[ApiRoute]:
    async def messages(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, shape = await read_request(request, MessageRequest, lambda one: message_ask(one, service.model))
        writer = MessageWriter(f"msg_{request.state.request_id}", shape.model, hides_thinking=shape.hides_thinking)
        return await answered(service, request, key, [ask], lambda _: writer, streams=shape.streams)

    async def count_tokens(request: Request) -> Response:
        return JSONResponse({"input_tokens": await service.num_tokens(request, CountRequest, CountRequest.chat)})

    return [
        ApiRoute("/v1/messages", messages, methods=["POST"]),
        ApiRoute("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
