"""The routes of no other API: health, sessions, cancelling, and a text as the model's tokens.

The shapes of `/tokenize` and `/detokenize` follow vLLM's documentation ("OpenAI-Compatible Server", Tokenizer API), the
shape of `/apply-template` llama.cpp's server ("POST /apply-template").
"""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.llm import LLM
from splitinfer.server.ask import AskedChat, check_size, known_tokens
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields, ListOf, TokenId
from splitinfer.server.gate import SESSION_COOKIE, cookie
from splitinfer.server.health import health_document
from splitinfer.server.keys import NOBODY
from splitinfer.server.openai.chat import Conversation
from splitinfer.server.openai.messages import Messages
from splitinfer.server.problem import Problem, unsupported
from splitinfer.server.reading import with_marks
from splitinfer.server.refused import TEMPLATE
from splitinfer.server.service import ApiRoute, Service
from splitinfer.text.conversations import Conversations

# -- requests and answers of texts -----------------------------------------------------------------


class TemplateRequest(Conversation):
    """A chat in the form of a chat request. Fields about the answer are ignored."""

    refused = TEMPLATE
    model: Any = None
    messages: Messages

    def chat(self) -> AskedChat:
        return self.written(self.messages)


class TokenizeRequest(Conversation):
    """A text, or a chat as in ``TemplateRequest``. ``return_token_strs``: also return the text of each token.
    ``add_special_tokens``: add the tokenizer's special tokens to a text; a chat has those in its template."""

    refused = TEMPLATE
    model: Any = None
    messages: Messages | None = None
    prompt: str | None = None
    return_token_strs: bool = False
    add_special_tokens: bool | None = None

    def asked(self) -> AskedChat | str:
        """Return the text or the chat to tokenize.

        Raises:
            Problem: 400, fields contradict each other.
        """
        match self.prompt, self.messages:
            case str(text), None:
                return text
            case None, list(messages) if self.add_special_tokens:
                raise unsupported("add_special_tokens", "a chat has those that the model's template writes")
            case None, list(messages):
                return self.written(messages)
        raise Problem(400, "give either prompt or messages", param="prompt")


class DetokenizeRequest(Fields):
    tokens: ListOf[TokenId]
    model: Any = None


# -- the routes ------------------------------------------------------------------------------------


def own_routes(service: Service) -> list[ApiRoute]:
    return [*_state_routes(service), *_text_routes(service)]


def _state_routes(service: Service) -> list[ApiRoute]:
    async def health(_request: Request) -> Response:
        status, document = health_document(
            service.llm.health(), service.num_running, is_draining=service.is_draining
        )  # fmt: skip
        return JSONResponse(document, status)

    async def cancel(request: Request) -> Response:
        if not service.cancel(request.path_params["request_id"], service.caller(request)):
            raise Problem(404, "no request of this key with this id is under way")
        return JSONResponse({"cancelled": True})

    async def session(request: Request) -> Response:
        is_secure = request.scope["scheme"] == "https"
        facts = request.state.facts
        if request.method == "DELETE":
            ended = service.sessions.end(facts.cookies.get(SESSION_COOKIE, ""))
            gone = {"Set-Cookie": cookie("", is_secure=is_secure, seconds=0)}
            return JSONResponse({"ended": ended}, headers=gone)
        key = service.gate.caller(facts, None)  # a key is needed: a session must not prolong itself
        if key is NOBODY:
            return JSONResponse({"session": False})  # no key is needed, so no session
        named = {"Set-Cookie": cookie(service.sessions.begin(key), is_secure=is_secure)}
        return JSONResponse({"session": True, "name": key.name, "scopes": sorted(key.scopes)}, headers=named)

    return [
        ApiRoute("/health", health, methods=["GET"]),
        ApiRoute("/session", session, methods=["POST", "DELETE"]),
        ApiRoute("/v1/requests/{request_id}", cancel, methods=["DELETE"]),
    ]


def _tokens(llm: LLM, asked: AskedChat | str, *, adds_special: bool) -> list[int]:
    """Return the tokens of a text or of a chat. ``adds_special``: add the tokenizer's special tokens to a text.

    Raises:
        Problem: the prompt is too long, or has pictures.
    """
    if not isinstance(asked, AskedChat):
        check_size(llm, asked)
        return llm.tokenizer.encode(asked, adds_special=adds_special)
    plain, urls = with_marks(llm, asked)
    if urls:
        raise unsupported("messages", "the rows of a picture are not tokens")
    return known_tokens(llm, plain, Conversations())[0]


def _text_routes(service: Service) -> list[ApiRoute]:
    llm = service.llm

    async def tokenize(request: Request) -> Response:
        key = service.caller(request)
        wanted, asked = await read_request(request, TokenizeRequest, lambda one: (one, one.asked()))

        def work() -> Response:
            tokens = _tokens(llm, asked, adds_special=wanted.add_special_tokens is not False)
            texts = [llm.tokenizer.token_bytes(token) for token in tokens] if wanted.return_token_strs else None
            strings = None if texts is None else [text.decode("utf-8", "replace") for text in texts]
            about = {"count": len(tokens), "max_model_len": llm.context_length}
            return JSONResponse({**about, "tokens": tokens, "token_strs": strings})

        with service.admitted(key):
            return await service.reader.beside(work, request.state.size)

    async def detokenize(request: Request) -> Response:
        key = service.caller(request)
        tokens = await read_request(request, DetokenizeRequest, lambda one: one.tokens)
        if len(tokens) > llm.context_length:
            sentence = f"tokens has {len(tokens):,} ids, but the context is {llm.context_length:,}"
            raise Problem(400, sentence, param="tokens")
        with service.admitted(key):
            text = await asyncio.to_thread(llm.tokenizer.decode, tokens, shows_special=True)
            return JSONResponse({"prompt": text})

    async def apply_template(request: Request) -> Response:
        key = service.caller(request)
        asked = await read_request(request, TemplateRequest, TemplateRequest.chat)

        def work() -> Response:
            _, text = known_tokens(llm, with_marks(llm, asked)[0], Conversations())
            return JSONResponse({"prompt": text})

        with service.admitted(key):
            return await service.reader.beside(work, request.state.size)

    async def tokenizer_info(request: Request) -> Response:
        service.caller(request)
        if not llm.has_tokenizer:
            raise Problem(404, "the model's folder has no tokenizer")
        return JSONResponse({**llm.tokenizer.info, "model_max_length": llm.context_length})

    return [
        ApiRoute("/tokenizer_info", tokenizer_info, methods=["GET"]),
        ApiRoute("/tokenize", tokenize, methods=["POST"]),
        ApiRoute("/detokenize", detokenize, methods=["POST"]),
        ApiRoute("/apply-template", apply_template, methods=["POST"]),
    ]
