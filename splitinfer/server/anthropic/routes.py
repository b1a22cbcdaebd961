"""Anthropic's routes: each reads a request, asks for an answer, and writes it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.answer import Answer
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest
from splitinfer.server.anthropic.writer import MessageWriter
from splitinfer.server.asking import answering
from splitinfer.server.service import ApiRoute, Service


def anthropic_routes(service: Service) -> list[ApiRoute]:
    def writer(asked: MessageRequest, name: str, request: Request, _answer: Answer) -> MessageWriter:
        return MessageWriter(f"msg_{request.state.request_id}", name, hides_thinking=asked.hides_thinking)

    async def count_tokens(request: Request) -> Response:
        return JSONResponse({"input_tokens": await service.num_tokens(request, CountRequest, CountRequest.chat)})

    return [
        ApiRoute("/v1/messages", answering(service, MessageRequest, writer), methods=["POST"]),
        ApiRoute("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
