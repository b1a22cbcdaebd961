"""The page's routes: its files, which need no key, because nothing in them is secret; and the figures, which need one.

Starlette serves the files, and only those in `site/` and `vendor/`.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from splitinfer.server.page.feed import EVERY, Feed
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import Document, EventStream, event

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify splitinfer",
    )
)
"""What the page may load and do, whatever an answer has in it (W3C, Content Security Policy Level 3; Trusted Types):
nothing of other servers, no script or style in a text, and HTML only as DOMPurify has let it through."""


_SOON = 0.02  # seconds, until another cut has come into force

_HEADERS = {
    "Cache-Control": "no-cache",  # the browser asks each time, and usually gets 304
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


_FILES = {name: StaticFiles(directory=Path(__file__).with_name(name)) for name in ("site", "vendor")}


async def _served(name: str, request: Request) -> Response:
    """Return a file, or 304 if the browser has it.

    Raises:
        Problem: 404, no file has that name.
    """
    folder, _, inside = name.partition("/")
    try:
        if folder not in _FILES:
            raise HTTPException(404)
        found = await _FILES[folder].get_response(inside, request.scope)
    except HTTPException:
        raise Problem(404, f"the page has no file {name!r:.80}") from None
    found.headers.update(_HEADERS)
    return found


def page_routes(service: Service) -> list[ApiRoute]:
    feed = Feed(service.llm, service.model, lambda: service.is_draining)

    async def file(request: Request) -> Response:
        if "name" not in request.path_params and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running")  # programs for Ollama look for this text
        return await _served(request.path_params.get("name", "site/index.html"), request)

    async def figures(request: Request) -> Response | EventStream:
        service.caller(request)
        if request.method == "GET" and "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(_events(service, feed))
        looking = feed.num_watching
        with feed.watched():
            while not (made := feed.since(0)):
                await asyncio.sleep(_SOON)
            _, document = made[-1]
            return Document({"pipeline": feed.pipeline(), "figures": document, "looking": looking})

    return [
        ApiRoute("/", file, methods=["GET"]),
        ApiRoute("/page/{name:path}", file, methods=["GET"]),
        ApiRoute("/v1/splitinfer/figures", figures, methods=["GET"]),
    ]


async def _events(service: Service, feed: Feed) -> AsyncGenerator[bytes, None]:
    """Yield the figures while the page is open, until the server ends. Unchanged figures are not sent again."""
    told, number, last = None, 0, None
    with feed.watched():
        while not service.is_draining:
            found = feed.since(number)
            if found and (pipeline := feed.pipeline()) != told:  # before the figures of its stages
                told = pipeline
                yield event(pipeline, "pipeline")
            for made, document in found:
                number = made
                if document != last:
                    last = document
                    yield event(document, "figures")
            await asyncio.sleep(EVERY)
