"""The page's routes: its files, which need no key, as nothing in them is secret; and the figures, which need one."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.page.assets import CONTENT_SECURITY_POLICY, FRONT, Asset, assets, is_known, takes_gzip
from splitinfer.server.page.feed import EVERY, Feed
from splitinfer.server.problem import Problem
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service
from splitinfer.server.stream import EventStream, event

_SOON = 0.02  # seconds, until another cut has come into force

_HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}


def page_routes(service: Service) -> list[ApiRoute]:
    """The routes of the page."""
    feed = Feed(service.llm, service.model, lambda: service.is_draining)

    async def front(request: Request) -> Response:
        return _served(assets()[FRONT], request)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        asset = assets().get(name)
        if asset is None:
            raise Problem(404, f"the page has no file {name!r:.80}")
        return _served(asset, request)

    async def figures(request: Request) -> Response | EventStream:
        service.gate.caller(request.state.facts, service.sessions)
        if request.method == "GET" and "text/event-stream" in request.headers.get("accept", ""):
            return EventStream(_events(service, feed))
        looking = feed.num_watching
        with feed.watched():
            while not (made := feed.since(0)):
                await asyncio.sleep(_SOON)
            _, document = made[-1]
            return JSONResponse({"pipeline": feed.pipeline(), "figures": document, "looking": looking})

    return [
        ApiRoute("/", front, methods=["GET"]),
        ApiRoute("/page/{name:path}", file, methods=["GET"]),
        ApiRoute("/v1/splitinfer/figures", figures, methods=["GET"]),
    ]


def _served(asset: Asset, request: Request) -> Response:
    headers = {**_HEADERS, "ETag": asset.etag}
    if is_known(asset, request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if asset.packed is not None and takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(asset.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.media_type)
    return Response(asset.data, headers=headers, media_type=asset.media_type)


async def _events(service: Service, feed: Feed) -> AsyncGenerator[bytes, None]:
    """The figures while somebody looks; they end with the server. What has not changed is not sent again."""
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
