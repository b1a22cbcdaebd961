"""An engine over a toy of stages, in milliseconds: what its thread owns no other thread touches, whatever is asked at
the same time; and a loss, another cut and the end get in each other's way."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import pytest
from core.toy import VOCAB, ToyStage, alone, config_of
from processes import until

from splitinfer.core.absence import Rest
from splitinfer.core.layout import Layout, StageSpec, lay_out
from splitinfer.core.plan import StageFigures
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.engine.device.steps import StepsUnderWay
from splitinfer.engine.fleet.pipeline import LocalResult
from splitinfer.engine.loop import absent
from splitinfer.engine.loop import engine as module
from splitinfer.engine.loop.engine import Engine
from splitinfer.engine.loop.loop import Loop
from splitinfer.engine.loop.open_requests import OpenRequests
from splitinfer.engine.loop.reopening import Reopening
from splitinfer.engine.loop.requests import RequestState
from splitinfer.errors import CannotFit, PeerError, SplitinferError, WorkerLost

SECONDS = 30.0
_CHANGES = (
    *("add", "finish", "expire", "update", "learn", "requeue_all", "moved_to"),
    *("lower_budget", "tune", "take_drafts", "schedule"),
)
OWNED = {
    **{owner: [name for name in vars(owner) if not name.startswith("__")] for owner in (Loop, OpenRequests, Reopening)},
    Scheduler: _CHANGES,
}
"""What is called on the engine's thread alone."""


class Toy:
    """In the place of ``Pipeline``: every step returns after ``seconds``. ``refuses``: cuts that cannot be opened."""

    lost_worker, lost_name, busy_name, remedy = "s1", "s1", None, "restarting it"
    drafts, codecs, ready, ranks = True, (), (), ()

    def __init__(self, config: Layout, put: Callable[[Any], None], _notice: object) -> None:
        self.layout, self._put = config, put
        self.stage, self.local = ToyStage(), self
        self.is_open, self.device, self.refuses, self.seconds = False, self, set[str](), 0.0
        self.steps = StepsUnderWay[object](put)

    def open(self, *_: object, meanwhile: Callable[[], None] = lambda: None, **_named: object) -> None:
        self.stage.forget()
        meanwhile()
        if self.layout.cut in self.refuses:
            raise CannotFit(f"{self.layout.cut} does not fit")
        self.is_open = True

    def use_layout(self, rest: Rest) -> None:
        self.layout = rest.layout

    def find(self, worker: StageSpec) -> str | None:
        return None if "4-4" in self.refuses else worker.address

    def follow(self, _by_key: object) -> None:
        """No worker moves."""

    def renew_links(self, _reason: str) -> None:
        self.is_open = False

    def launch(self, step: StepInFlight, _masks: object) -> None:
        time.sleep(self.seconds)
        now = time.monotonic()
        figures = tuple(StageFigures(i, now, now) for i in range(self.layout.num_stages))
        result = replace(self.stage.run(step.plan), figures=figures)
        self._put(LocalResult(result, now, cast("Any", self)))

    def receive(self, event: LocalResult, _oldest: object) -> object:
        return event.result

    def kept(self) -> tuple[()]:
        return ()

    def prepare_next(self) -> bool:
        return False

    def close(self, _reason: str) -> None:
        self.is_open = False


def cut(first: int) -> Layout:
    """A layout of eight layers; the toy runs it as one stage."""
    return Layout(lay_out([("s0", first, None), ("s1", 8 - first, "tcp://there:1")]), "toy")


@contextmanager
def engine_of(monkeypatch: pytest.MonkeyPatch, timeout: float = SECONDS, **named: Any) -> Iterator[tuple[Engine, Toy]]:
    monkeypatch.setattr(module, "Pipeline", Toy)
    config = config_of(max_running=4, max_waiting=1000)
    made = Engine(cast("Any", cut(4)), lambda _name, _progress: None, lambda _: config, timeout, **named)
    made.wait_until_ready()
    try:
        yield made, cast("Any", made.pipeline)
    finally:
        made.close(SECONDS)
        assert not made._thread.is_alive()


def request(number: int, max_tokens: int = 20) -> RequestState:
    sequence = Sequence(number, [number % VOCAB, 1, 2], SamplingParams(max_tokens=max_tokens), number, frozenset())
    return RequestState(sequence, None, time.monotonic)


def read(state: RequestState) -> tuple[list[int], str, str | None]:
    """Its tokens, why it ended, and the error."""
    tokens = list[int]()
    while True:
        event = state.get()
        tokens += event.token_ids
        if event.finish_reason is not None:
            return tokens, event.finish_reason, event.error


def lose(_loop: Loop) -> None:
    raise WorkerLost("worker s1 is gone")


def asked_and_lost(engine: Engine, toy: Toy, *refuses: str, max_tokens: int = 500) -> RequestState:
    """A request, whose worker is lost: cuts that cannot be opened from then on."""
    toy.refuses, state = set(refuses), request(1, max_tokens)
    engine.submit(state)
    engine.call(lose)
    return state


def only_on(thread: Callable[[], threading.Thread], method: Callable[..., Any], wrong: list[str]) -> Callable[..., Any]:
    @wraps(method)
    def checked(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is not thread():
            wrong.append(f"{method.__qualname__} on {threading.current_thread().name}")
        return method(*args, **named)

    return checked


def test_what_the_thread_owns_no_other_thread_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, made = list[str](), list[Engine]()
    for owner, names in OWNED.items():
        for name in names:
            if callable(method := vars(owner)[name]):
                monkeypatch.setattr(owner, name, only_on(lambda: _engine_thread(made), method, wrong))
    with engine_of(monkeypatch) as (engine, _toy), ThreadPoolExecutor(6) as pool:
        made.append(engine)
        states = [request(i) for i in range(20)]
        asked: list[Future[Any]] = [pool.submit(engine.submit, state) for state in states]
        cuts = [pool.submit(engine.recut, cut(3 + i)) for i in range(2)]
        asked += [pool.submit(engine.abort, 19), pool.submit(engine.carry_out, int)]
        asked += [pool.submit(engine.call, lambda loop: loop.tune("rules", lambda it: it.tune(PolicyConfig(), 4, 3)))]
        asked += [
            pool.submit(look) for look in (engine.stats, engine.health, engine.figures.histograms) for _ in range(9)
        ]
        for one in (*cuts, *asked):
            one.result(SECONDS)
        engine.call(lose)  # not before: a loss while another cut is loaded refuses it
        for state in states:
            tokens, reason, _ = read(state)
            right, _ = alone(state.sequence, state.sequence.tokens[:3], 1000)
            assert reason == "length" or state.seq_id == 19
            assert tokens == right[: len(tokens)]
        engine.drain(SECONDS)
        with pytest.raises(PeerError, match="the coordinator is shutting down"):
            engine.recut(cut(2))
    assert wrong == []


def _engine_thread(made: list[Engine]) -> threading.Thread:
    named = [made[0]._thread] if made else [one for one in threading.enumerate() if one.name == "engine"]
    return named[-1]


@pytest.mark.parametrize(("ending", "deadline"), [("length", None), ("abort", 0.0)])
def test_a_request_is_counted_before_its_reader_is_told(
    ending: str, deadline: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the last event may ask for figures at once."""
    with engine_of(monkeypatch) as (engine, _toy):
        seen: queue.SimpleQueue[object] = queue.SimpleQueue()  # the reader may be faster than who tells it
        sequence = replace(request(1, 1).sequence, deadline=deadline)
        state = RequestState(sequence, None, time.monotonic, lambda: seen.put(engine.stats()["finished"]))
        engine.submit(state)
        assert read(state)[1] == ending
        assert seen.get(timeout=60) == {ending: 1}


@pytest.mark.parametrize("timeout", [0.0, 0.4])
def test_who_waits_for_what_does_not_come_back_is_told(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, and who asked for another cut."""
    with engine_of(monkeypatch, timeout) as (engine, toy), ThreadPoolExecutor(1) as pool:
        state = asked_and_lost(engine, toy, "4-4", "6-2", max_tokens=10**6)
        paused = pool.submit(engine.recut, cut(6))
        assert "worker s1 is gone" in str(read(state)[2])
        with pytest.raises(SplitinferError):
            paused.result(SECONDS)
        with pytest.raises(SplitinferError, match="worker s1 is gone"):
            engine.submit(request(2))


ALONE = Rest(Layout(lay_out([("s0", 8, None)]), "toy"), 64, speed=8.0)
TOLD = "s1 is gone. s0 goes on alone with 8 of 8 layers, at about 8.0 tokens/s; s1 takes part again when"


def alone_without(_known: object, gone: Collection[StageSpec], longest: int) -> Rest:
    assert ([one.name for one in gone], longest >= 20) == (["s1"], True)
    return ALONE


def test_the_others_go_on_without_a_worker_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the written layout is loaded, but while a request is open only if that pays."""
    monkeypatch.setattr(absent, "_SEARCH_EVERY", 0.02)
    monkeypatch.setattr(absent, "pays", lambda *_: False)
    with engine_of(monkeypatch, replan=alone_without, leave_after=0.3) as (engine, toy):
        began = time.monotonic()
        engine.submit(request(2, 10**6))
        state = asked_and_lost(engine, toy, "4-4")
        until(lambda: engine.health().absent == f"{TOLD} it is back.", "it is left out", SECONDS)
        assert time.monotonic() - began > 0.3
        assert (engine.layout.cut, engine.health().waits_for) == ("8", None)
        tokens, reason, _ = read(state)
        right, _ = alone(state.sequence, state.sequence.tokens[:3], 4000)
        assert (reason, tokens) == ("length", right[: len(tokens)])
        toy.refuses, toy.seconds = set(), 0.002  # the long one has thousands of tokens to come
        time.sleep(0.2)
        assert engine.layout.cut == "8", "a request is open"
        engine.abort(2)
        until(lambda: engine.layout.cut == "4-4", "it is back", SECONDS)
        until(lambda: engine.health().absent is None, "and said so", SECONDS)


def test_open_requests_move_back_if_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "_SEARCH_EVERY", 0.02)
    monkeypatch.setattr(absent, "pays", lambda *_: True)
    with engine_of(monkeypatch, replan=alone_without, leave_after=0.0) as (engine, toy):
        for number in range(4):
            state = request(number, 10**6)
            engine.submit(state)
            toy.refuses = {"4-4"}
            engine.call(lose)
            until(lambda: engine.layout.cut == "8", "it is left out", SECONDS)
            toy.refuses = set()
            if number < 2:
                until(lambda: engine.layout.cut == "4-4", "it is back", SECONDS)
                engine.abort(number)
        assert str(engine.health().absent).startswith("s1 is gone, for the third time in ten minutes.")
        time.sleep(0.2)
        assert engine.layout.cut == "8", "it flaps"
        for number in range(4):
            engine.abort(number)
        until(lambda: engine.layout.cut == "4-4", "nobody waits", SECONDS)


def test_what_the_others_cannot_hold_is_said_once_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*_: object) -> Rest:
        raise CannotFit("12 GB of memory are missing")

    monkeypatch.setattr(absent, "_LOOK_AGAIN", 0.05)
    with engine_of(monkeypatch, replan=cannot, leave_after=0.1) as (engine, toy):
        state = asked_and_lost(engine, toy, "4-4")
        time.sleep(0.8)
        assert engine.health().waits_for is not None
        toy.refuses = set()
        assert read(state)[1] == "length"
    assert [line for line in caplog.messages if "are missing" in line] == [
        "12 GB of memory are missing; requests wait for it"
    ]


def test_a_layout_without_it_that_fails_leaves_them_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(monkeypatch, replan=alone_without, leave_after=0.1) as (engine, toy):
        state = asked_and_lost(engine, toy, "4-4", "8")
        time.sleep(0.5)
        assert engine.health().waits_for is not None
        toy.refuses = set()
        assert read(state)[1] == "length"
        assert (engine.layout.cut, engine.health().absent) == ("4-4", None)


def test_it_ends_while_a_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(monkeypatch) as (engine, toy):
        state = asked_and_lost(engine, toy, "4-4", max_tokens=10**6)
        until(lambda: engine.health().waits_for is not None, "the loss", SECONDS)
        engine.close(SECONDS)
        assert read(state)[1:] == ("abort", None)
        with pytest.raises(PeerError, match="the pipeline was closed"):
            engine.recut(cut(5))
