"""Several models behind one server: loads who is asked for, closes who has rested, and sends each request to its model.

`core.residents` decides; this carries it out, on the event loop, with loading and closing beside it. Each model that is
loaded has a service and a router of its own; what no model is needed for (sessions, the page, lists of models) goes to
whichever was used last.

    request ──▶ which model? ──▶ loaded: its router
                                 not: it waits, with pings if it is a stream ──▶ loaded: its router goes on
                                      (`X-Splitinfer-Timeout`: no longer than that; 503 says when to come again)

A stream that has been pinged has begun with 200, so an error behind that is the last event, in the API's own form. A
server of one model has nothing of this.
"""

import asyncio
import logging
import math
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitinfer.core.residents import Bounds, Resident, decide
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM
from splitinfer.server.asking import handling_of
from splitinfer.server.body import body_of, parsed
from splitinfer.server.health import Offer, health_document, named
from splitinfer.server.problem import AGAIN, ANTHROPIC, OLLAMA, Problem, ending, form_of, problem_of
from splitinfer.server.service import Service
from splitinfer.server.stream import (
    COMMENT_PING,
    EVENTS,
    LINE_PING,
    NDJSON,
    PING_EVERY,
    event,
    json_line,
    left,
    stream_headers,
)

log = logging.getLogger(__name__)

_CHOOSES_NONE = ("/session", "/v1/splitinfer/", "/api/show")  # what is posted there is for no model


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that may be loaded. ``model``: its folder, or its name at the hub; ``context``: its own. ``needs``,
    ``workers``: as in ``Resident``, before it is loaded. ``open``: loads it, in any thread."""

    name: str
    model: str
    context: int
    needs: int
    workers: frozenset[str]
    open: Callable[[], LLM]


@dataclass(slots=True, eq=False)
class _Held:
    """``service``, ``app``: while it is loaded. ``seconds``: that loading took the last time."""

    entry: Entry
    service: Service | None = None
    app: ASGIApp | None = None
    num_using: int = 0
    used_at: float = 0.0
    seconds: float = AGAIN

    @property
    def resident(self) -> Resident:
        entry, service = self.entry, self.service
        if service is None:
            return Resident(entry.name, entry.needs, entry.workers)
        failure = service.llm.health().failure
        needs = entry.needs + kv_here(service.llm)
        return Resident(entry.name, needs, entry.workers, True, self.num_using, self.used_at, failure is not None)

    @property
    def is_ready(self) -> bool:
        return self.service is not None and self.service.llm.health().failure is None


def kv_here(llm: LLM) -> int:
    """Bytes on this machine that a loaded model's KV may come to."""
    stages = zip(llm.layout.stages, llm.kv_budget.stages, strict=False)
    return sum(kv.budget_bytes for i, (spec, kv) in enumerate(stages) if i == 0 or spec.is_local)


class Unloaded:
    """In place of an LLM where none is loaded."""

    def __getattr__(self, name: str) -> Any:
        raise Problem(503, "no model is loaded now; a request that names one loads it", retry_after=AGAIN)


Ticket = asyncio.Future["_Held"]
"""Is done when its request may use the model, until it gives the ticket back."""


class Residents:
    """The models of one server, on its event loop. ``front``: the service of no model, whose routes are for all.
    ``router``: makes the routes of a service."""

    def __init__(
        self, entries: Sequence[Entry], bounds: Bounds, front: Service, router: Callable[[Service], ASGIApp]
    ) -> None:
        self._held = {entry.name: _Held(entry) for entry in entries}
        self._bounds, self._front, self._router = bounds, front, router
        self._waiting: dict[Ticket, _Held] = {}  # by age
        self._leaving = frozenset[str]()
        self._acting: asyncio.Task[None] | None = None
        self._is_closed = False
        front.offers = self.offers
        self._front_app = router(front)

    def offers(self) -> list[Offer]:
        """All models, the one that was used last first."""
        return [self._offer(held) for held in sorted(self._held.values(), key=lambda each: -each.used_at)]

    def _offer(self, held: _Held) -> Offer:
        entry, service, ttl = held.entry, held.service, self._bounds.ttl
        if service is None:
            return Offer(entry.name, entry.model, entry.context)
        rests = None if ttl is None else time.time() + (ttl if held.num_using else self._left(held, ttl))
        return service.offer(rests)

    def _left(self, held: _Held, ttl: float) -> float:
        return max(0.0, held.used_at + ttl - time.monotonic())

    @property
    def loaded(self) -> list[Service]:
        return [held.service for held in self._held.values() if held.service is not None]

    @property
    def num_running(self) -> int:
        return len(self._waiting) + sum(held.num_using for held in self._held.values())

    def app(self) -> ASGIApp:
        """The routes of the model that was used last; of none, where none is loaded."""
        ready = [held for held in self._held.values() if held.app is not None]
        last = max(ready, key=lambda held: held.used_at, default=None)
        return self._front_app if last is None or last.app is None else last.app

    # -- asking for one ------------------------------------------------------------------------

    def ask(self, name: str) -> Ticket:
        """A ticket for the model, which has to be given back (``release``). It fails as loading does."""
        held, ticket = self._held[name], asyncio.get_running_loop().create_future()
        if held.is_ready and name not in self._leaving:
            self._admit(held, ticket)
            return ticket
        self._waiting[ticket] = held
        self.turn()
        return ticket

    def release(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)
        if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
            held = ticket.result()
            held.num_using -= 1
            held.used_at = time.monotonic()
        ticket.cancel()
        self.turn()

    def seconds_until(self, name: str) -> float:
        """A guess when a model will be there."""
        return self._held[name].seconds

    def _admit(self, held: _Held, ticket: Ticket) -> None:
        held.num_using += 1
        held.used_at = time.monotonic()
        ticket.set_result(held)

    def turn(self) -> None:
        """Do what is to be done, unless something is being done: then this is called behind it. Called once a second,
        too, so that who has rested is unloaded."""
        if self._acting is not None or self._is_closed:
            return
        while True:
            now, models = time.monotonic(), [held.resident for held in self._held.values()]
            turn = decide(models, [held.entry.name for held in self._waiting.values()], self._bounds, now)
            self._leaving = turn.leaving.union(turn.unload)
            waiting = self._waiting.items()
            may = [each for each in waiting if each[1].is_ready and each[1].entry.name not in self._leaving]
            if not may:
                break
            for ticket, held in may:
                del self._waiting[ticket]
                self._admit(held, ticket)
        if turn.unload or turn.load is not None:
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

    async def _close(self, held: _Held) -> None:
        service, held.service, held.app = held.service, None, None
        if service is not None:
            service.is_draining = True  # ends the streams of its figures
            await asyncio.to_thread(service.llm.close)
            log.info("%s is unloaded", held.entry.name)

    async def _load(self, held: _Held) -> None:
        began = time.monotonic()
        try:
            llm = await asyncio.to_thread(held.entry.open)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told, and others are served
            log.warning("%s cannot be loaded: %s", held.entry.name, error)
            problem = problem_of(error) if isinstance(error, SplitinferError) else None
            why = f"the model {held.entry.name!r:.80} cannot be loaded now; the server's log says why"
            again = None if problem is not None and problem.retry_after is None else AGAIN
            self._fail(held, Problem(503, why, retry_after=again))
            return
        held.seconds = time.monotonic() - began
        if self._is_closed:
            llm.close()
        else:
            log.info("%s is loaded, in %.1f s", held.entry.name, held.seconds)
            self.put(held.entry.name, llm)

    def put(self, name: str, llm: LLM) -> None:
        """A model has been loaded."""
        held = self._held[name]
        held.service = self._front.beside(llm, name)
        held.app, held.used_at = self._router(held.service), time.monotonic()

    def _fail(self, held: _Held, problem: Problem) -> None:
        for ticket in [ticket for ticket, wanted in self._waiting.items() if wanted is held]:
            del self._waiting[ticket]
            ticket.set_exception(problem)

    # -- the end, from another thread ------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Take no new request; answers have so many seconds to end."""
        if services := self.loaded:
            with ThreadPoolExecutor(len(services)) as pool:
                list(pool.map(lambda service: service.llm.drain(seconds), services))

    def close(self) -> None:
        """End all pipelines, as ``LLM.close``."""
        self._is_closed = True
        for service in self.loaded:
            service.llm.close()


# -- which model a request is for ------------------------------------------------------------------


@dataclass(slots=True)
class Several:
    """The ASGI application of a server of several models, within the guard. ``first``: the model of requests that name
    none."""

    residents: Residents
    front: Service
    first: str
    _is_draining: bool = field(default=False, init=False)

    @property
    def num_running(self) -> int:
        return self.residents.num_running

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._is_draining = value
        for service in (self.front, *self.residents.loaded):
            service.is_draining = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request.

        Raises:
            ClientDisconnect: the client has gone.
            Problem: 404, there is no such model; 503, it cannot be loaded, or not in time; else as its route.
        """
        if scope["path"] == "/health":
            await self._health()(scope, receive, send)
        elif scope["method"] != "POST" or scope["path"].startswith(_CHOOSES_NONE):
            await self.residents.app()(scope, receive, send)
        else:
            await self._chosen(Request(scope, receive), send)

    def _health(self) -> JSONResponse:
        models = [{"name": each.name, "loaded": each.layout is not None} for each in self.residents.offers()]
        used = next((one for one in self.residents.loaded if one.model == models[0]["name"]), None)
        if used is None or used.llm.health().failure is not None:  # the next request loads it again
            word = "draining" if self.is_draining else "ok"
            status, document = 503 if self.is_draining else 200, {"status": word, "running": self.num_running}
        else:
            status, document = health_document(used.llm.health(), self.num_running, is_draining=self.is_draining)
        return JSONResponse({**document, "models": models}, status)

    async def _chosen(self, request: Request, send: Send) -> None:
        self.front.caller(request)  # before anything of the body is read
        if self.is_draining:
            raise ending()
        request.state.raw = raw = await body_of(request)
        asked = await asyncio.to_thread(parsed, raw)
        name, answer = self._name(asked), _Pinged(send, request.scope["path"])
        ticket = self.residents.ask(name)
        try:
            if not ticket.done():
                await self._wait(ticket, name, request, answer if _streams(asked, answer.path) else None)
            held = await ticket
            assert held.app is not None
            await held.app(request.scope, request.receive, answer)
        except (Problem, SplitinferError) as error:
            if not answer.has_begun:
                raise
            await answer.fail(error if isinstance(error, Problem) else problem_of(error))
        finally:
            self.residents.release(ticket)

    def _name(self, asked: Mapping[str, Any]) -> str:
        wanted = asked.get("model") or asked.get("name")
        return named(self.residents.offers(), wanted).name if isinstance(wanted, str) else self.first

    async def _wait(self, ticket: Ticket, name: str, request: Request, pinged: "_Pinged | None") -> None:
        """Wait until a model is there, or cannot be loaded. ``pinged``: gets a ping in silence.

        Raises:
            ClientDisconnect: the client has gone.
            Problem: 503, the request's own time is over.
        """
        most, began = handling_of(request).timeout, time.monotonic()
        leaving = asyncio.create_task(left(request.receive))
        try:
            while not ticket.done():
                over = math.inf if most is None else most - (time.monotonic() - began)
                if over <= 0:
                    why = f"the model {name!r:.80} was not there within {most:g} s"
                    raise Problem(503, why, retry_after=self.residents.seconds_until(name))
                await asyncio.wait((ticket, leaving), timeout=min(PING_EVERY, over), return_when=FIRST_COMPLETED)
                if leaving.done():
                    raise ClientDisconnect
                if pinged is not None and not ticket.done() and over > PING_EVERY:
                    await pinged.ping()
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


def _streams(asked: Mapping[str, Any], path: str) -> bool:
    return asked.get("stream", path.startswith(OLLAMA)) is True


@dataclass(slots=True)
class _Pinged:
    """Passes on what a route sends. Once it was pinged, the response has begun, and is a stream."""

    send: Send
    path: str
    has_begun: bool = False

    async def __call__(self, message: Message) -> None:
        if not (self.has_begun and message["type"] == "http.response.start"):
            await self.send(message)

    async def ping(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = stream_headers(NDJSON if self.path.startswith(OLLAMA) else EVENTS)
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        ping = LINE_PING if self.path.startswith(OLLAMA) else COMMENT_PING
        ping = event({"type": "ping"}, "ping") if self.path.startswith(ANTHROPIC) else ping
        await self.send({"type": "http.response.body", "body": ping, "more_body": True})

    async def fail(self, problem: Problem) -> None:
        """The last event, which says why there is no answer."""
        form = form_of(problem, self.path)
        if self.path.startswith(OLLAMA):
            last = json_line(form).encode() + b"\n"
        else:
            last = event(form, "error" if self.path.startswith(ANTHROPIC) else None)
        await self.send({"type": "http.response.body", "body": last, "more_body": False})
