"""Several models in one server: loads requested models, closes idle ones, and sends each request to its model.

`server.residents` decides; this module acts, on the event loop, and loads and closes on threads. Each loaded model has
a service and routes of its own. A request that is not posted to a model (dials, figures) names it with ``?model=NAME``.
Without a name, the model used last answers, also for routes of no model (sessions, the page, lists of models). A
request whose model is not loaded waits, with pings if it is a stream. A stream with a ping has begun with status 200,
so a later error is its last event, in the API's own form.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitinfer.errors import CannotFit, ModelError, SplitinferError
from splitinfer.llm import LLM
from splitinfer.server.asking import handling_of, until_gone
from splitinfer.server.body import body_of, parsed
from splitinfer.server.health import Offer, named
from splitinfer.server.problem import AGAIN, ANTHROPIC, OLLAMA, Problem, ending, form_of, problem_of
from splitinfer.server.residents import Bounds, Resident, decide
from splitinfer.server.service import Service
from splitinfer.server.stream import (
    COMMENT_PING,
    EVENTS,
    LINE_PING,
    NDJSON,
    event,
    line,
    response_start,
)

log = logging.getLogger(__name__)

_METRICS = "/metrics"  # of all models
_OWN = "/v1/splitinfer/"
_OF_NO_MODEL = ("/session", _OWN, "/api/show")  # requests posted there name no model


@dataclass(slots=True, eq=False)
class Entry:
    """A model that may be loaded. ``model``: its folder, or its name at the hub; ``context``: its own. ``needs``,
    ``workers``: as in ``Resident``, before it is loaded; ``needs`` becomes all memory if the model did not fit beside
    others. ``open``: loads it, in any thread. ``service``, ``app``: set while it is loaded. ``seconds``: the time that
    loading took last."""

    name: str
    model: str
    context: int
    needs: int
    workers: frozenset[str]
    open: Callable[[], LLM]
    service: Service | None = None
    app: ASGIApp | None = None
    num_using: int = 0
    used_at: float = 0.0
    seconds: float = AGAIN

    @property
    def resident(self) -> Resident:
        if self.service is None:
            return Resident(self.name, self.needs, self.workers)
        needs = self.needs + _kv_here(self.service.llm)
        return Resident(self.name, needs, self.workers, True, self.num_using, self.used_at, not self.is_ready)

    @property
    def is_ready(self) -> bool:
        return self.service is not None and self.service.llm.health().failure is None

    def offer(self, ttl: float | None) -> Offer:
        if self.service is None:
            return Offer(self.name, self.model, self.context)
        since = time.monotonic() if self.num_using else self.used_at
        return self.service.offer(None if ttl is None else time.time() + ttl + since - time.monotonic())


def _kv_here(llm: LLM) -> int:
    """Return the most bytes that a loaded model's KV may take on this machine."""
    stages = zip(llm.layout.stages, llm.kv_budget.stages, strict=False)
    return sum(kv.budget_bytes for i, (spec, kv) in enumerate(stages) if i == 0 or spec.is_local)


class Unloaded:
    """Stands for an LLM that is not loaded."""

    def __getattr__(self, name: str) -> Any:
        raise Problem(503, "no model is loaded now; a request that names one loads it", retry_after=AGAIN)


ModelTicket = asyncio.Future[Entry]
"""Done when its request may use the model, until the request gives it back."""


class Several:
    """The ASGI application of a server of several models, inside the guard. It runs on its event loop, except ``put``,
    ``drain`` and ``close``. Requests without a model's name go to the first of ``entries``. ``front``: the service of
    no model; the models' services share its callers and counts. ``routes``: makes the routes of a service."""

    def __init__(
        self, entries: Sequence[Entry], bounds: Bounds, front: Service, routes: Callable[[Service], ASGIApp]
    ) -> None:
        self._held = {entry.name: entry for entry in entries}
        self._first, self._bounds, self._front, self._routes = entries[0].name, bounds, front, routes
        self._waiting: dict[ModelTicket, Entry] = {}  # by age
        self._leaving = frozenset[str]()
        self._acting: asyncio.Task[None] | None = None
        self._is_closed = False
        front.offers, front.loaded = self.offers, lambda: self._loaded
        self._front_app = routes(front)

    def offers(self) -> list[Offer]:
        """Return all models, the last used first."""
        return [held.offer(self._bounds.ttl) for held in self._by_use]

    @property
    def _by_use(self) -> list[Entry]:
        return sorted(self._held.values(), key=lambda held: -held.used_at)

    @property
    def _loaded(self) -> list[Service]:
        return [held.service for held in self._held.values() if held.service is not None]

    @property
    def num_running(self) -> int:
        return len(self._waiting) + sum(held.num_using for held in self._held.values())

    @property
    def is_draining(self) -> bool:
        return self._front.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        for service in (self._front, *self._loaded):
            service.is_draining = value

    # -- models come and go --------------------------------------------------------------------

    def ask(self, name: str) -> ModelTicket:
        """Return a ticket for the model; give it back with ``release``. The ticket fails if loading fails."""
        ticket: ModelTicket = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = self._held[name]
        self._admit()
        self.turn()
        return ticket

    def release(self, ticket: ModelTicket) -> None:
        self._waiting.pop(ticket, None)
        if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
            held = ticket.result()
            held.num_using, held.used_at = held.num_using - 1, time.monotonic()
        ticket.cancel()
        self.turn()

    @property
    def _wanted(self) -> list[tuple[ModelTicket, Entry]]:
        """The tickets of waiting requests, the oldest first. A cancelled ticket stays a little longer until it is given
        back."""
        return [(ticket, held) for ticket, held in self._waiting.items() if not ticket.done()]

    def _admit(self) -> bool:
        """Give waiting requests their models if these are ready. Return whether any request got one."""
        may = [each for each in self._wanted if each[1].is_ready and each[1].name not in self._leaving]
        for ticket, held in may:
            del self._waiting[ticket]
            held.num_using, held.used_at = held.num_using + 1, time.monotonic()
            ticket.set_result(held)
        return bool(may)

    def turn(self) -> None:
        """Do the next step that ``residents`` decides. If a step is under way, this runs again after it. Runs every
        second, too, to unload idle models."""
        is_decided = self._acting is not None or self._is_closed
        while not is_decided:
            models, waiting = [held.resident for held in self._held.values()], [held.name for _, held in self._wanted]
            turn = decide(models, waiting, self._bounds, time.monotonic())
            self._leaving = turn.leaving.union(turn.unload)  # at once: the task begins later
            is_decided = not self._admit()
            if is_decided and (turn.unload or turn.load is not None):
                self._acting = asyncio.create_task(self._act(turn.unload, turn.load))

    async def _act(self, unload: Sequence[str], load: str | None) -> None:
        try:
            for name in unload:
                await self._close(self._held[name])
            if load is not None:
                await self._load(self._held[load])
        finally:
            self._acting = None
            self.turn()

    async def _close(self, held: Entry) -> None:
        service, held.service, held.app = held.service, None, None
        if service is not None:
            service.is_draining = True  # ends the streams of its figures
            await asyncio.to_thread(service.llm.close)
            log.info("%s is unloaded", held.name)

    async def _load(self, held: Entry) -> None:
        name, began = held.name, time.monotonic()
        try:
            llm = await asyncio.to_thread(held.open)
        except Exception as error:  # noqa: BLE001 - any error goes to the waiting requests; the server goes on
            log.warning("%s cannot be loaded: %s", name, error)
            if isinstance(error, CannotFit) and self._loaded:  # the others take more than expected, so swap
                held.needs = self._bounds.room
                return
            why = f"the model {name!r:.80} cannot be loaded now; the server's log says why"
            for ticket in [ticket for ticket, wanted in self._wanted if wanted is held]:
                del self._waiting[ticket]
                ticket.set_exception(Problem(503, why, retry_after=None if isinstance(error, ModelError) else AGAIN))
            return
        held.seconds = time.monotonic() - began
        log.info("%s is loaded, in %.1f s", name, held.seconds)
        self.put(name, llm)
        if self._is_closed:
            llm.close()

    def put(self, name: str, llm: LLM) -> None:
        """Register a model that was loaded."""
        held = self._held[name]
        held.service = self._front.beside(llm, name)
        held.app, held.used_at = self._routes(held.service), time.monotonic()

    def drain(self, seconds: float) -> None:
        """End all loaded models' requests, as ``LLM.drain`` does, at once."""
        with ThreadPoolExecutor(1 + len(self._loaded)) as pool:
            list(pool.map(lambda service: service.llm.drain(seconds), self._loaded))

    def close(self) -> None:
        """Close all loaded models (``LLM.close``)."""
        self._is_closed = True
        for service in self._loaded:
            service.llm.close()

    # -- which model a request is for ------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request.

        Raises:
            ClientDisconnect: the client has gone.
            Problem: 404, the model does not exist; 503, it cannot be loaded, or not in time; or as its route.
        """
        if scope["path"] == "/health":
            await self._health()(scope, receive, send)
        elif scope["path"] == _METRICS:
            await self._front_app(scope, receive, send)
        elif scope["method"] != "POST" or scope["path"].startswith(_OF_NO_MODEL):
            await self._named(Request(scope))(scope, receive, send)
        else:
            await self._chosen(Request(scope, receive), send)

    def _health(self) -> JSONResponse:
        """Return the health document. A failed pipeline does not count against it: the next request loads it again."""
        models = [
            {
                "name": held.name,
                "loaded": held.service is not None,
                "absent": None if held.service is None else held.service.llm.health().absent,
            }
            for held in self._by_use
        ]
        document = {"status": "draining" if self.is_draining else "ok", "running": self.num_running, "models": models}
        return JSONResponse(document, 503 if self.is_draining else 200)

    def _named(self, request: Request) -> ASGIApp:
        """Return the routes of the model in the query. Without a name, return the routes of the model used last.

        Raises:
            Problem: 404, the model does not exist; 503, it is not loaded; 400, several models are loaded and the
                request would change one.
        """
        name, path = request.query_params.get("model"), request.url.path
        loaded = [held for held in self._by_use if held.app is not None]
        if name is None and len(loaded) > 1 and request.method in ("PATCH", "POST") and path.startswith(_OWN):
            names = ", ".join(held.name for held in loaded)
            raise Problem(
                400, f"{len(loaded)} models are loaded ({names}): name one with {path}?model=NAME", param="model"
            )
        if name is not None:
            self._front.caller(request)
            wanted = named(self.offers(), name).name
            loaded = [held for held in loaded if held.name == wanted]
            if not loaded:
                raise Problem(503, f"{wanted!r:.80} is not loaded now; a request to it loads it", retry_after=AGAIN)
        return next((held.app for held in loaded if held.app is not None), self._front_app)

    async def _chosen(self, request: Request, send: Send) -> None:
        self._front.caller(request)  # before reading the body
        if self.is_draining:
            raise ending()
        request.state.raw = raw = await body_of(request)
        asked, answer = await asyncio.to_thread(parsed, raw), _Pinged(send, request.scope["path"])
        wanted = asked.get("model")
        name = named(self.offers(), wanted).name if wanted and isinstance(wanted, str) else self._first
        is_stream = asked.get("stream", answer.path.startswith(OLLAMA)) is True
        ticket = self.ask(name)
        try:
            ping = answer.ping if is_stream else None
            held = await self._wait(ticket, self._held[name], request, ping)
            assert held.app is not None
            await held.app(request.scope, request.receive, answer)
        except (Problem, SplitinferError) as error:
            if not answer.has_begun:
                raise
            await answer.fail(error if isinstance(error, Problem) else problem_of(error))
        finally:
            self.release(ticket)

    async def _wait(
        self, ticket: ModelTicket, wanted: Entry, request: Request, ping: Callable[[], Awaitable[None]] | None
    ) -> Entry:
        """Return the model once it is loaded. A stream gets a ``ping`` in silence.

        Raises:
            ClientDisconnect: the client has gone.
            Problem: 503, the model cannot be loaded, or the request's timeout has passed.
        """
        most = handling_of(request).timeout
        try:
            async with asyncio.timeout(most):
                return await until_gone(request, ticket, ping)
        except TimeoutError:
            why = f"the model {wanted.name!r:.80} was not loaded within {most:g} s"
            raise Problem(503, why, retry_after=wanted.seconds) from None


class _Pinged:
    """Passes on a route's messages. After a ping, the response has begun, and is a stream."""

    def __init__(self, send: Send, path: str) -> None:
        self.path, self.has_begun, self._send = path, False, send
        self._is_ollama, self._is_anthropic = path.startswith(OLLAMA), path.startswith(ANTHROPIC)

    async def __call__(self, message: Message) -> None:
        if not (self.has_begun and message["type"] == "http.response.start"):
            await self._send(message)

    async def ping(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(response_start(NDJSON if self._is_ollama else EVENTS))
        ping = event({"type": "ping"}, "ping") if self._is_anthropic else COMMENT_PING
        await self._write(LINE_PING if self._is_ollama else ping, ends=False)

    async def fail(self, problem: Problem) -> None:
        """Send the last event, which says why there is no answer."""
        form = form_of(problem, self.path)
        last = line(form) if self._is_ollama else event(form, "error" if self._is_anthropic else None)
        await self._write(last, ends=True)

    async def _write(self, data: bytes, *, ends: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not ends})
