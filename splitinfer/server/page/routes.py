"""The page's routes: its files, which need no key, as nothing in them is secret; and the figures, which need one.

The files are read once. Only what lies in `site/` and `vendor/` is there, by its whole path: a request's path is looked
up and never opened.
"""

import asyncio
import gzip
import hashlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.server.page.feed import EVERY, Feed
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import EventStream, event

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".LICENSE": "text/plain; charset=utf-8",
}
FRONT = "site/index.html"
_FOLDERS = ("site", "vendor")

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


@dataclass(frozen=True, slots=True)
class Asset:
    """A file. ``packed``: by gzip, where that is shorter. ``etag``: changes with the content."""

    media_type: str
    data: bytes
    packed: bytes | None
    etag: str


def asset_of(name: str, data: bytes) -> Asset:
    """A file as it is served.

    Raises:
        ValueError: the name says no media type that the page uses.
    """
    media_type = next((found for end, found in MEDIA_TYPES.items() if name.endswith(end)), None)
    if media_type is None:
        raise ValueError(f"the page has no files like {name}")
    packed = gzip.compress(data, 9, mtime=0)
    etag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    return Asset(media_type, data, packed if len(packed) < len(data) else None, etag)


@cache
def assets() -> dict[str, Asset]:
    """All files of the page, by their paths in this package."""
    root = files(__package__ or "")
    return {
        path: asset_of(path, file.read_bytes()) for folder in _FOLDERS for path, file in _walk(root / folder, folder)
    }


def _walk(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        name = f"{path}/{each.name}"
        if each.is_dir():
            yield from _walk(each, name)
        elif not each.name.startswith("."):
            yield name, each


def is_known(asset: Asset, if_none_match: str) -> bool:
    """Whether a browser has this very content (RFC 9110, 13.1.2).

    >>> is_known(asset_of("a.js", b"1"), 'W/"x", ' + asset_of("a.js", b"1").etag)
    True
    """
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return asset.etag in tags or "*" in tags


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a browser takes gzip.

    >>> takes_gzip("deflate, gzip;q=1.0"), takes_gzip("gzip;q=0"), takes_gzip("")
    (True, False, False)
    """
    for each in accept_encoding.lower().split(","):
        name, _, weight = each.strip().partition(";")
        if name.strip() == "gzip":
            return weight.strip().replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


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
        service.caller(request)
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
