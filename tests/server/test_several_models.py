"""Several models behind one server, of which none is real: a request waits for its model, and for nothing else."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from asgi import Client, answer, in_loop, posted, until
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from valid_requests import Asked

from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.sampling_defaults import NOTHING
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.errors import CannotFit, ModelError, PeerError
from splitinfer.llm import LLM
from splitinfer.server import asking
from splitinfer.server.api_routes import api_routes
from splitinfer.server.guard import Guard
from splitinfer.server.problem import Problem
from splitinfer.server.residents import Bounds
from splitinfer.server.running import make_app
from splitinfer.server.service import Service
from splitinfer.server.several import Entry, Several, Unloaded

CHAT = "/v1/chat/completions"
ONE = Bounds(room=100)


class Pipeline:
    """``log``: what was done with it."""

    context_length, has_tokenizer, recommended_sampling = 64, False, NOTHING
    kv_budget = KVBudget((StageKV(10, 1),))

    def __init__(self, name: str, log: list[str]) -> None:
        self.layout = Layout((StageSpec("here", 0, 2),), name, name="planned")
        self.failure: str | None = None
        self._log, self.name = log, name
        log.append(f"+{name}")

    def health(self) -> PipelineHealth:
        return PipelineHealth((), failure=self.failure)

    def drain(self, _seconds: float) -> None:
        self._log.append(f"~{self.name}")

    def close(self) -> None:
        self._log.append(f"-{self.name}")


class Shop:
    """A server of models, each of 60 bytes; its routes say which it was and go on when ``goes_on`` is set."""

    def __init__(self, bounds: Bounds = ONE, names: Sequence[str] = "ab", loads: Callable[[], Any] = lambda: None):
        self.log, self.made, self.loads = list[str](), list[Pipeline](), loads
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        front = Service(Unloaded(), "")
        self.several = Several([self._entry(name) for name in names], bounds, front, self._routes)
        self.app: Guard = make_app(front, self.several)

    def _entry(self, name: str) -> Entry:
        def load() -> LLM:
            self.loads()
            self.made.append(Pipeline(name, self.log))
            return self.made[-1]

        return Entry(name, f"org/{name}", 128, 60, frozenset(), load)

    def _routes(self, service: Service) -> ASGIApp:
        listing = next(one for one in api_routes(service) if one.path == "/v1/models")

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/v1/models":
                await listing.app(scope, receive, send)
            else:
                await self.goes_on.wait()
                await JSONResponse({"by": service.model})(scope, receive, send)

        return route

    async def said(self, model: str | None, path: str = CHAT, *headers: tuple[str, str], **more: Any) -> Any:
        named = {} if model is None else {"model": model}
        return await answer(self.app, posted(path, named | more, *headers))


@in_loop
async def test_the_request_picks_and_what_does_not_fit_beside_it_goes():
    shop = Shop()
    for wanted, by in ((None, "a"), ("b", "b"), ("b:latest", "b"), ("a", "a")):
        assert (await shop.said(wanted)).json == {"by": by}
    assert shop.log == ["+a", "-a", "+b", "-b", "+a"]
    unknown = await shop.said("c")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    listed = (await answer(shop.app, Asked("GET", "/v1/models"))).json["data"]
    assert [(one["id"], one["loaded"], one["context_length"]) for one in listed] == [("a", True, 64), ("b", False, 128)]
    shop.several.is_draining = True
    assert (await shop.said("a")).status == 503
    assert (await answer(shop.app, Asked("GET", "/health"))).status == 503


@in_loop
async def test_what_is_in_use_stays_and_who_came_first_is_first():
    shop = Shop()
    await shop.said("a")
    shop.goes_on.clear()
    using = Client(shop.app, posted(CHAT, {"model": "a"}))
    await until(lambda: shop.several.num_running == 1)
    other = Client(shop.app, posted(CHAT, {"model": "b"}))
    await until(lambda: shop.several.num_running == 2)
    late = Client(shop.app, posted(CHAT, {"model": "a"}))  # "a" has to go now
    gone = Client(shop.app, posted(CHAT, {"model": "b"}))
    await until(lambda: shop.several.num_running == 4)
    await gone.leave()
    assert shop.log == ["+a"]
    shop.goes_on.set()
    assert [(await each.whole()).json["by"] for each in (using, other, late)] == ["a", "b", "a"]
    assert shop.log == ["+a", "-a", "+b", "-b", "+a"]
    assert shop.several.num_running == 0


@in_loop
async def test_one_that_is_just_about_to_go_takes_no_request():
    shop = Shop()
    await shop.said("a")
    other, same = shop.several.ask("b"), shop.several.ask("a")
    assert not same.done()
    await other
    shop.several.release(other)
    await same
    assert shop.log == ["+a", "-a", "+b", "-b", "+a"]


@in_loop
async def test_what_is_not_posted_to_a_model_says_which():
    """What changes a model must name it where two are loaded."""
    shop, dials = Shop(Bounds(room=1000)), "/v1/splitinfer/dials"

    async def by(method: str, path: str) -> Any:
        said = await answer(shop.app, replace(posted(path, {}), method=method))
        return said.json["by"] if said.status == 200 else said.status

    for name in "ab":
        assert await by("GET", f"{dials}?model=b") == 503
        await shop.said(name)
    for name in "ab":
        assert await by("GET", f"{dials}?model={name}") == await by("PATCH", f"{dials}?model={name}:latest") == name
    assert [await by(method, dials) for method in ("GET", "PATCH", "POST")] == ["b", 400, 400]
    assert await by("PATCH", f"{dials}?model=c") == 404
    assert await by("GET", "/metrics") == "", "of all models"
    assert {service.model for service in shop.several._front.loaded()} == {"a", "b"}


@in_loop
@pytest.mark.parametrize("fails", [False, True])
async def test_who_has_gone_gets_neither_the_model_nor_its_error(fails: bool):
    """Cancelled, and not given back yet: another is served, and the model may go afterwards."""
    may_load = threading.Event()

    def loads() -> None:
        may_load.wait(10)
        if fails and len(shop.log) == 0:
            raise PeerError("no worker")

    shop = Shop(loads=loads)
    gone, stays = shop.several.ask("a"), shop.several.ask("a")
    gone.cancel()
    may_load.set()
    if fails:
        with pytest.raises(Problem, match="cannot be loaded now"):
            await stays
    else:
        assert (await stays).name == "a"
    for ticket in (gone, stays):
        shop.several.release(ticket)
    assert shop.several.num_running == 0


@in_loop
async def test_who_rests_is_unloaded():
    shop = Shop(Bounds(100, ttl=0.05))
    await shop.said("a")
    await until(lambda: shop.several.turn() is None and shop.log == ["+a", "-a"])
    figures = await answer(shop.app, Asked("GET", "/v1/models"))
    assert not any(one["loaded"] for one in figures.json["data"])
    assert (await answer(shop.app, Asked("GET", "/health"))).status == 200
    assert (await shop.said("a")).json == {"by": "a"}


@in_loop
async def test_one_that_does_not_fit_after_all_is_loaded_in_place_of_others():
    shop = Shop(Bounds(1000))
    await shop.said("a")

    def load() -> None:
        if shop.log == ["+a"]:
            raise CannotFit("1 GB too little")

    shop.loads = load
    assert (await shop.said("b")).json == {"by": "b"}
    assert (await shop.said("a")).json == {"by": "a"}
    assert shop.log == ["+a", "-a", "+b", "-b", "+a"]


@in_loop
async def test_a_pipeline_that_has_failed_is_loaded_again():
    shop = Shop()
    await shop.said("a")
    shop.made[0].failure = "lost"
    assert (await shop.said("a")).json == {"by": "a"}
    assert shop.log == ["+a", "-a", "+a"]


@pytest.mark.parametrize(("error", "again"), [(PeerError("mini 10.0.0.3 is away"), "5"), (ModelError("damaged"), None)])
@in_loop
async def test_one_that_cannot_be_loaded_is_told_to_those_who_wait(error: Exception, again: str | None):
    def fail() -> None:
        raise error

    shop = Shop(loads=fail)
    first, second = await asyncio.gather(shop.said("a"), shop.said("b"))
    for said in (first, second):
        assert (said.status, said.headers.get("retry-after")) == (503, again)
        assert "cannot be loaded now" in said.json["error"]["message"]
        assert "10.0.0.3" not in said.body.decode()


SLOW = {"stream": True}
ENDS = {
    CHAT: (b": ping\n\n", 'data: {"error":{"message":'),
    "/v1/messages": (b'event: ping\ndata: {"type":"ping"}\n\n', 'event: error\ndata: {"type":"error"'),
    "/api/chat": (b" ", ' {"error":"'),
}


@pytest.mark.parametrize("path", ENDS)
@in_loop
async def test_a_stream_is_pinged_while_its_model_is_loaded(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "PING_EVERY", 0.01)
    ping, end = ENDS[path]

    there, fails = threading.Event(), [True]

    def load() -> None:
        there.wait(20)
        if fails:
            raise PeerError("no")

    shop = Shop(loads=load)
    asked = posted(path, {"model": "a", **({} if path == "/api/chat" else SLOW)})
    client = Client(shop.app, asked)
    assert await client.part() == ping
    there.set()
    said = await client.whole()
    assert (said.status, end in said.body.decode()) == (200, True)
    there.clear()
    fails.clear()
    client = Client(shop.app, asked)
    assert await client.part() == ping
    there.set()
    said = await client.whole()
    assert said.body.endswith(b'{"by":"a"}')
    assert said.status == 200


@in_loop
async def test_the_impatient_are_told_when_to_come_again():
    there = threading.Event()
    shop = Shop(loads=lambda: there.wait(20))
    said = await shop.said("a", CHAT, ("X-Splitinfer-Timeout", "0.01"))
    assert (said.status, said.headers["retry-after"]) == (503, "5")
    there.set()
    assert (await shop.said("a")).status == 200
    shop.several.drain(1.0)
    shop.several.close()
    assert shop.log == ["+a", "~a", "-a"]


def test_without_a_model_its_figures_are_refused():
    with pytest.raises(Problem, match="no model is loaded"):
        Unloaded().stats
