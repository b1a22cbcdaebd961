"""The routes that belong to no API of others: health, sessions, cancelling, and a text as the model's tokens."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.ask import Chat
from splitinfer.server.body import read_json
from splitinfer.server.fields import read
from splitinfer.server.gate import SESSION_COOKIE
from splitinfer.server.health import health_document
from splitinfer.server.keys import NOBODY, ApiKey
from splitinfer.server.preparing import check_size, prompt_tokens, settled_chat
from splitinfer.server.problem import Problem
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service
from splitinfer.server.sessions import cookie
from splitinfer.server.texts import DetokenizeRequest, TemplateRequest, TokenizeRequest, tokenize_ask, tokenized


def own_routes(service: Service) -> list[ApiRoute]:
    """The server's own routes."""
    return [*_state_routes(service), *_text_routes(service)]


def _state_routes(service: Service) -> list[ApiRoute]:
    async def health(_request: Request) -> Response:
        status, document = health_document(
            service.llm.health(), service.num_running, is_draining=service.is_draining
        )  # fmt: skip
        return JSONResponse(document, status)

    async def cancel(request: Request) -> Response:
        if not service.cancel(request.path_params["request_id"], _caller(service, request)):
            raise Problem(404, "no request of this key with this id is under way")
        return JSONResponse({"cancelled": True})

    async def session(request: Request) -> Response:
        is_secure = request.scope["scheme"] == "https"
        facts = request.state.facts
        if request.method == "DELETE":
            ended = service.sessions.end(facts.cookies.get(SESSION_COOKIE, ""))
            gone = {"Set-Cookie": cookie("", is_secure=is_secure, seconds=0)}
            return JSONResponse({"ended": ended}, headers=gone)
        key = service.gate.caller(facts, None)  # a key, as a session must not prolong itself
        if key is NOBODY:
            return JSONResponse({"session": False})  # none is needed
        named = {"Set-Cookie": cookie(service.sessions.begin(key), is_secure=is_secure)}
        return JSONResponse({"session": True, "name": key.name, "scopes": sorted(key.scopes)}, headers=named)

    return [
        ApiRoute("/health", health, methods=["GET"]),
        ApiRoute("/session", session, methods=["POST", "DELETE"]),
        ApiRoute("/v1/requests/{request_id}", cancel, methods=["DELETE"]),
    ]


def _text_routes(service: Service) -> list[ApiRoute]:
    llm = service.llm

    async def tokenize(request: Request) -> Response:
        key = _caller(service, request)
        asked, wants_texts = await read_json(request, lambda body: tokenize_ask(read(TokenizeRequest, body)))

        def work() -> Response:
            if isinstance(asked, Chat):
                tokens = prompt_tokens(llm, asked)
            else:
                check_size(llm, asked.text)
                tokens = llm.encode(asked.text, adds_special=asked.adds_special)
            texts = [llm.token_bytes(token) for token in tokens] if wants_texts else None
            return JSONResponse(tokenized(tokens, llm.context_length, texts))

        with service.admitted(key):
            return await asyncio.to_thread(work)

    async def detokenize(request: Request) -> Response:
        key = _caller(service, request)
        tokens = await read_json(request, lambda body: read(DetokenizeRequest, body).tokens)
        if len(tokens) > llm.context_length:
            sentence = f"tokens has {len(tokens):,} ids, but the context is {llm.context_length:,}"
            raise Problem(400, sentence, param="tokens")
        with service.admitted(key):
            return JSONResponse({"prompt": await asyncio.to_thread(llm.decode, tokens)})

    async def apply_template(request: Request) -> Response:
        key = _caller(service, request)
        asked = await read_json(request, lambda body: read(TemplateRequest, body).chat())

        def work() -> Response:
            check_size(llm, asked)
            chat = settled_chat(llm, asked)
            opens = chat.opens_answer
            text = llm.render_chat(chat.messages, tools=chat.tools, options=chat.options, opens_answer=opens)
            return JSONResponse({"prompt": text})

        with service.admitted(key):
            return await asyncio.to_thread(work)

    return [
        ApiRoute("/tokenize", tokenize, methods=["POST"]),
        ApiRoute("/detokenize", detokenize, methods=["POST"]),
        ApiRoute("/apply-template", apply_template, methods=["POST"]),
    ]


def _caller(service: Service, request: Request) -> ApiKey:
    return service.gate.caller(request.state.facts, service.sessions)
