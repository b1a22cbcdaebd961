"""The outermost layer of the server: rules for every request, whatever its route.

Each request has an id (`X-Request-Id`: the client's own, if it is a plain word). The log shows it, and the client can
cancel the request by it. A request from a page of another site is turned away before anything is read. Every error has
the form of the requested API and shows only its sentence. A target may be absolute (`GET http://HOST/PATH`), as proxies
write it; then its host counts, and `Host` does not (RFC 9112, 3.2.2).

Each request has one line in the log when it is over. The line shows nothing of a prompt or an answer, and only the path
of an address, without the query.

    request req_5f… laptop POST /v1/chat/completions 200, 5,120 of 20,412 prompt tokens cached, 311 generated, 14.2 s
"""

import logging
import re
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote, unquote

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitinfer.errors import Draining, SplitinferError
from splitinfer.server.answer import Usage
from splitinfer.server.body import MAX_BYTES, Bodies
from splitinfer.server.fields import Ignored
from splitinfer.server.gate import Facts, Gate, Sessions
from splitinfer.server.meters.http import OTHER
from splitinfer.server.problem import Problem, form_of, problem_of
from splitinfer.server.service import new_request_id

# -- the log ---------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status for a client that left
_MOST_METHOD, _MOST_PATH = 20, 80  # characters


def line(request_id: str, key: str, method: str, path: str, status: int, usage: Usage | None, seconds: float) -> str:
    """Return the line of one request. ``usage``: of the answer, if one was asked for.

    >>> line("req_1", "laptop", "GET", "/v1/models", 200, None, 0.004)
    'request req_1 laptop GET /v1/models 200, 0.0 s'
    """
    tokens = "" if usage is None else (
        f", {usage.cached:,} of {usage.prompt:,} prompt tokens cached, {usage.generated:,} generated"
    )  # fmt: skip
    shown = quote(path, safe="/:._-")[:_MOST_PATH]  # a path may hold anything, including line breaks
    return f"request {request_id} {key} {method[:_MOST_METHOD]} {shown} {status}{tokens}, {seconds:.1f} s"


def where(error: BaseException | None) -> str:
    """Return where an error was raised: its text could quote a prompt."""
    return "" if error is None else "".join(traceback.format_tb(error.__traceback__))


# -- the guard -------------------------------------------------------------------------------------


MAX_HEAD_BYTES = 64 << 10  # a request's line and headers

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CORS_METHODS = "GET, POST, PATCH, DELETE, OPTIONS"
_CORS_SECONDS = "600"
_ONCE = ("host", "origin", "content-type", "content-encoding", "authorization", "x-api-key", "sec-fetch-site")
_ID_HEADERS = ("X-Request-Id", "Request-Id")  # as OpenAI's and as Anthropic's clients read it
IGNORED = "X-Splitinfer-Ignored"  # the fields of the request that have no effect
_MOST_NOTED = 1000
_HEADERS = {"X-Content-Type-Options": "nosniff"}
_NO_STORE = "no-store"  # unless the answer says otherwise, as the page's files do


class Guard:
    """An ASGI application around another. ``scope["state"]`` of a request gets its ``facts``, its ``request_id``, when
    it ``began``, the ``size`` that its body takes of ``bodies``, and the names of the fields that are ``ignored``, for
    a header and once for the log; a stream tells by ``has_left`` that its client did not wait for its end.
    ``failure``: why the pipeline takes no request any more, for clients. ``ended``: told of each request's route and
    status when it is over."""

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        sessions: Sessions,
        bodies: Bodies | None = None,
        failure: Callable[[], str | None] = lambda: None,
        ended: Callable[[str, int], None] = lambda _route, _status: None,
    ) -> None:
        self._app, self._gate, self._sessions, self._bodies = app, gate, sessions, bodies or Bodies()
        self._failure, self._ended = failure, ended
        self._noted = set[str]()  # fields that have no effect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = with_plain_target(scope)
        facts, request_id = facts_of(scope), _id_of(Headers(scope=scope))
        ignored: Ignored = {}
        answered, began = _Answered(send, request_id, self._cors(facts), ignored), time.monotonic()
        state = scope.setdefault("state", {})
        state.update(facts=facts, request_id=request_id, began=began, bodies=self._bodies, size=0, ignored=ignored)
        try:
            await self._carry_out(facts, scope, receive, answered)
        finally:
            self._bodies.held -= state["size"]
            self._note(ignored)
            status = CLIENT_GONE if state.get("has_left") else answered.status
            is_of_page = facts.path.startswith("/page/")  # opening the page reads 30 files
            level = logging.DEBUG if is_of_page else logging.INFO
            if log.isEnabledFor(level):
                who, seconds = self._gate.name_of_caller(facts, self._sessions), time.monotonic() - began
                usage = state["answer"].usage if "answer" in state else None
                log.log(level, "%s", line(request_id, who, facts.method, facts.path, status, usage, seconds))
            self._ended(state.get("route", OTHER), status)

    def _note(self, ignored: Ignored) -> None:
        """Log each field that has no effect once, as far as strangers let room for it."""
        for name in ignored:
            if name not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(name)
                log.info("requests have the field %s, which has no effect here", name)

    async def _carry_out(self, facts: Facts, scope: Scope, receive: Receive, answered: "_Answered") -> None:
        try:
            if (turned_away := scope["state"].get("turned_away")) is not None:  # by the connection
                raise turned_away
            check_head(scope)
            self._gate.check_site(facts)
            if facts.method == "OPTIONS" and "access-control-request-method" in facts.headers:
                await Response(status_code=204)(scope, receive, answered)
            else:
                await self._app(scope, receive, answered)
        except (Problem, SplitinferError) as error:
            problem = error if isinstance(error, Problem) else problem_of(error, failure=self._failure())
            if problem.status >= 500 and not isinstance(error, Problem | Draining):
                log.warning("request %s failed: %s", scope["state"]["request_id"], error)
            await answered.refuse(problem, scope, receive)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - a client gets an answer whatever fails; the log has the place
            log.error("request %s failed: %s\n%s", scope["state"]["request_id"], type(error).__name__, where(error))
            await answered.refuse(Problem(500, "the server has failed; its log says why"), scope, receive)

    def _cors(self, facts: Facts) -> dict[str, str]:
        origin = facts.headers.get("origin")
        if origin is None or not self._gate.allows(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": _CORS_METHODS,
            "Access-Control-Allow-Headers": facts.headers.get("access-control-request-headers", "*"),
            "Access-Control-Expose-Headers": ", ".join((*_ID_HEADERS, "Retry-After", IGNORED)),
            "Access-Control-Max-Age": _CORS_SECONDS,
            "Vary": "Origin",
        }


class _Answered:
    def __init__(self, send: Send, request_id: str, headers: dict[str, str], ignored: Ignored) -> None:
        self._send, self._request_id, self._ignored = send, request_id, ignored
        self._headers = {**_HEADERS, **headers, **dict.fromkeys(_ID_HEADERS, request_id)}
        self._has_begun = False
        self.status = CLIENT_GONE
        """What was answered, once that has begun."""

    async def __call__(self, message: Message) -> None:
        """Send a message.

        Raises:
            ClientDisconnect: the server refused the rest of the request meanwhile, as its body is no HTTP.
        """
        if message["type"] == "http.response.start":
            self._has_begun = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._headers)
            if self._ignored:
                headers[IGNORED] = ", ".join(self._ignored)
            headers.setdefault("Cache-Control", _NO_STORE)
        try:
            await self._send(message)
        except h11.LocalProtocolError:
            self.status = CLIENT_GONE
            raise ClientDisconnect from None

    async def refuse(self, problem: Problem, scope: Scope, receive: Receive) -> None:
        """Send the problem to the client. Send nothing if the answer has already begun: then it ends in the middle."""
        if not self._has_begun:
            body = form_of(problem, scope["path"], self._request_id)
            with suppress(ClientDisconnect):
                await JSONResponse(body, problem.status, problem.headers)(scope, receive, self)


def with_plain_target(scope: Scope) -> Scope:
    """Return the request with a path as its target. The host of an absolute target becomes its `Host`."""
    scheme, separator, rest = scope["raw_path"].partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return scope
    host, _, path = rest.partition(b"/")
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers = [(b"host", host), *others]
    return {**scope, "path": unquote(f"/{path.decode('latin-1')}"), "raw_path": b"/" + path, "headers": headers}


def check_head(scope: Scope) -> None:
    """Refuse a head that is too large or contradicts itself, because a proxy in front may have believed the other
    header.

    Raises:
        Problem: 400, 413 for the body that it announces, or 431.
    """
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise Problem(431, f"the line and the headers of a request may have {MAX_HEAD_BYTES:,} bytes")
    headers = Headers(scope=scope)
    twice = next((name for name in _ONCE if len(headers.getlist(name)) > 1), None)
    if twice is not None:
        raise Problem(400, f"the header {twice} appears twice")
    length = headers.get("content-length")
    if length is not None and "transfer-encoding" in headers:  # RFC 9112, 6.1 and 6.3: it may be an attack
        raise Problem(400, "a body has a Content-Length or a Transfer-Encoding, not both", closes=True)
    if length is not None and length.isascii() and length.isdigit() and int(length) > MAX_BYTES:
        raise Problem(413, f"the body may have {MAX_BYTES:,} bytes")


def facts_of(scope: Scope) -> Facts:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    return Facts(scope["method"], scope["path"], headers, cookies_in(headers.get("cookie", "")))


def cookies_in(header: str) -> dict[str, str]:
    """Return the cookies of a header. Quotes stay, because this server's own cookies have none. `http.cookies` would
    remove their backslashes, which takes half a minute if a header of 64 KB has nothing else (CVE-2024-7592).

    >>> cookies_in('a=b; splitinfer_session=x-1;; ="')
    {'a': 'b', 'splitinfer_session': 'x-1', '': '"'}
    """
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, separator, value in pairs if separator}


def _id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()
