"""What is opened again, and when: the decisions alone, on stages that are none; and promises on real ones, in
moments that are held."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import stages
from processes import until

from splitinfer import SamplingParams
from splitinfer.config import Layout
from splitinfer.core.layout import Layout as PlainLayout
from splitinfer.core.liveness import StallDetector
from splitinfer.core.metrics.clocks import Clocks
from splitinfer.core.plan import StepPlan
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.coordinator import pipeline as pipeline_module
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.open_requests import InForce, OpenRequests
from splitinfer.engine.coordinator.own_steps import OwnSteps
from splitinfer.engine.coordinator.reopening import Reopening
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.engine.coordinator.worker_handle import Event
from splitinfer.engine.stage.loader import LoadedStage
from splitinfer.engine.worker import holder
from splitinfer.errors import WorkerLost
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM, setup
from splitinfer.llm.request import Request
from splitinfer.llm.setup import with_layers
from splitinfer.wire.messages import Load, Progress, Ready

BLOCK = 64
SECONDS = 60.0
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


Asked = Callable[[LLM, PlainLayout, int], list[Future[float]]]


def cut(*layers: int) -> Layout:
    described = [{"name": f"s{i}", "layers": n} for i, n in enumerate(layers)]
    return Layout.from_dict(
        {"stages": [one | ({"address": f"tcp://m{i}:1"} if i else {}) for i, one in enumerate(described)]}
    )


class Stop(Exception):
    """The loop ends."""


@dataclass
class Stages:
    """A pipeline that opens the cuts in ``usable``; of all others a worker is gone."""

    layout: Layout
    usable: tuple[str, ...]
    opened: list[str] = field(default_factory=list)
    clocks: Clocks = field(default_factory=lambda: Clocks(()))
    lost_name: str = "s1"
    remedy: str = "restarting it"
    while_opening: Callable[[], None] = lambda: None

    def open(self, connect_timeout: float | None = None, meanwhile: Callable[[], None] = lambda: None) -> None:
        meanwhile()
        self.opened.append(self.layout.cut)
        self.while_opening()
        if self.layout.cut not in self.usable:
            raise WorkerLost(f"nobody is there for {self.layout.cut}")

    def relay(self, layout: Layout) -> None:
        self.layout = layout

    def regroup(self, reason: str) -> None:
        pass

    def kept(self) -> tuple[()]:
        return ()


@dataclass
class FakeLoop:
    """A loop that listens ``patience`` times."""

    scheduler: Scheduler
    patience: int = 5
    is_closing: bool = False
    while_hearing: Callable[[], None] = lambda: None
    own_steps: "NoSteps" = field(default_factory=lambda: NoSteps())
    watch: StallDetector = field(default_factory=StallDetector)

    def use(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def hear(self) -> None:
        assert self.patience, "it is waited for without end"
        self.patience -= 1
        self.while_hearing()

    def stop_if_closing(self) -> None:
        if self.is_closing:
            raise Stop

    def draft_again(self) -> None:
        pass


class NoSteps(OwnSteps):
    """Nothing is under way on this machine."""

    def __init__(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def drop(self) -> None:
        pass


def configured(pipeline: Any) -> SchedulerConfig:
    """Bounds of a scheduler of all stages."""
    num_stages = len(pipeline.layout.stages)
    return SchedulerConfig(
        num_groups=num_stages, max_in_flight=num_stages + 1, token_budget=8, max_running=4, max_len=64
    )


def make(*usable: str) -> tuple[Reopening, Stages, FakeLoop]:
    """What opens the cut 2-2 again, of which ``usable`` says whether it is there."""
    pipeline = Stages(cut(2, 2), usable)
    loop = FakeLoop(Scheduler(configured(pipeline)))
    figures = Figures(["s0", "s1"], 0.0)
    requests = OpenRequests(figures, lambda _seq_id: None)
    requests.in_force = InForce(loop.scheduler, pipeline.layout)
    parts: Any = (loop, pipeline, requests, figures, configured)
    return Reopening(*parts, rejoin_timeout=SECONDS), pipeline, loop


def test_a_cut_takes_the_place_of_one_that_has_lost_a_worker():
    reopening, pipeline, loop = make("3-1")
    in_vain, asked = reopening.ask(cut(1, 3)), reopening.ask(cut(3, 1))
    reopening.rejoin(WorkerLost("gone"))
    with pytest.raises(WorkerLost, match="nobody is there for 1-3"):
        in_vain.result(0)
    assert asked.result(0) >= 0
    assert (pipeline.layout.cut, reopening.lost_stage, reopening.is_asked) == ("3-1", None, False)
    assert loop.scheduler.is_idle


def test_a_lost_worker_is_waited_for_where_no_cut_is_asked_for():
    reopening, pipeline, loop = make()

    def come_back() -> None:
        pipeline.usable = ("2-2",) if len(pipeline.opened) == 3 else ()

    pipeline.while_opening = come_back
    reopening.rejoin(WorkerLost("gone"))
    assert pipeline.opened == ["2-2"] * 3
    assert loop.patience == 3


def test_what_is_tuned_while_a_stage_is_away_goes_by_the_stages_that_come_back():
    reopening, pipeline, loop = make()
    there = ["cpu"]  # devices, of the pipeline that was opened last

    def tune() -> None:
        reopening.tune("rules", lambda it: it.tune(PolicyConfig(), 512 if "gpu" in there else 128, 4))
        reopening.tune("groups", lambda it: it.fix_groups(1))
        assert loop.scheduler.config.token_budget == 128, "no other device is there yet"
        pipeline.usable, there[:] = ("2-2",), ["gpu"]

    loop.while_hearing = tune
    reopening.rejoin(WorkerLost("gone"))
    assert loop.scheduler.config.token_budget == 512
    assert loop.scheduler.state.groups.most_groups == 1


def test_what_was_closed_meanwhile_is_not_opened_again():
    reopening, pipeline, loop = make("2-2")

    def close() -> None:
        loop.is_closing = True

    pipeline.while_opening = close
    reopening.ask(cut(1, 3))
    with pytest.raises(Stop):
        reopening.change()
    assert pipeline.opened == ["1-3"], "nobody is left who would end it"


@dataclass(eq=False)
class LoadingWorker:
    """A worker whose messages need no reading."""

    stage: int

    def receive(self, item: Any) -> Any:
        return item


def test_something_else_is_looked_at_while_workers_load():
    group = WorkerGroup(lambda _event: None, lambda _stage, _progress: None)
    worker: Any = LoadingWorker(1)
    ready: Any = Ready(1, 0, 0, 0, 0, 0, None, keeps_blocks=True, kept=None, hidden=None, device="cpu")
    group.workers.append(worker)
    assert group._opening is not None
    arrive, looks = group._opening.put, list[None]()

    def look() -> None:
        looks.append(None)
        if len(looks) == 4:
            arrive(Event(worker, ready, 0.0))

    arrive(Event(worker, ready, 0.0))
    assert group.await_ready(look) == [ready]
    assert len(looks) == 1
    assert group.await_ready(look) == [ready]
    assert len(looks) == 4, "nothing is heard of the worker for a while"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A function that has a cut asked for once so many steps more have been launched, at the worst moment: the result
    of the last is still to be read."""

    def ask(llm: LLM, layout: PlainLayout, steps: int) -> list[Future[float]]:
        launch, left, paused = OwnSteps.launch, [steps], list[Future[float]]()

        def launch_and_ask(self: OwnSteps, plan: StepPlan, *more: Any) -> None:
            launch(self, plan, *more)
            left[0] -= 1
            if left[0] == 0:
                paused.append(llm._engine._reopening.ask(layout))

        monkeypatch.setattr(OwnSteps, "launch", launch_and_ask)
        return paused

    return ask


def test_no_cut_is_opened_while_a_step_is_under_way(tiny_folder: Callable[..., Path], asked: Asked):
    with stages.pipeline(tiny_folder("llama"), [4]) as llm:
        right = stages.tokens_of(llm, stages.prompt(9), max_tokens=8)
        paused = asked(llm, llm.layout, 1)
        assert stages.tokens_of(llm, stages.prompt(9), max_tokens=8) == right
        assert paused[0].result(SECONDS) > 0


def test_what_is_on_disk_is_known_after_another_cut(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stages.shorten_blocks(monkeypatch, BLOCK)
    monkeypatch.setattr(setup, "WORTH", 1)
    with stages.pipeline(tiny_folder("llama"), [4], disks=[Disk(tmp_path, 10**9)], token_budget=BLOCK) as llm:
        first = llm.generate([stages.prompt(2 * BLOCK)], PARAMS)[0]
        own = llm._engine.pipeline._own
        assert own is not None
        assert own.disk is not None
        assert own.disk._store.flush(SECONDS)  # the stage stays as it is, and nobody else waits for its files
        llm.recut([4])
        again = llm.generate([stages.prompt(2 * BLOCK)], PARAMS)[0]
        assert (again.num_cached_tokens, again.token_ids) == (2 * BLOCK - 1, first.token_ids)


def test_requests_end_while_another_cut_is_loaded(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, asked: Asked
):
    """One is aborted, and the time of one is over, while the coordinator reads its own layers; one is aborted while it
    waits for a worker's."""
    load, expire = pipeline_module.load, Scheduler.expire
    requests, ended, own_is_loaded = list[Request](), dict[str, bool](), threading.Event()

    def is_open(request: Request) -> bool:
        return request._state.seq_id in llm._engine._requests

    def load_own(command: Load, name: str, report: Callable[[Progress], None], disk: Disk | None) -> LoadedStage:
        requests[0].abort()
        report(Progress("load", 0, 1))
        ended["aborted"] = not is_open(requests[0])
        monkeypatch.setattr(Scheduler, "expire", lambda self, now: expire(self, now + 20_000))
        report(Progress("load", 0, 1))
        ended["late"] = not is_open(requests[1])
        stage = load(command, name, report, disk)
        own_is_loaded.set()
        return stage

    def load_there(*args: Any) -> LoadedStage:
        if own_is_loaded.wait(SECONDS) and all(ended.values()):
            requests[2].abort()
            until(lambda: not is_open(requests[2]), "the abort", SECONDS)
            ended["aborted while a worker loads"] = True
        return load(*args)

    def submit() -> None:
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        for timeout in (None, 10_000, None, None):
            requests.append(llm.submit(stages.prompt(9), params, timeout=timeout))

    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm:
        right = stages.tokens_of(llm, stages.prompt(9), max_tokens=32)
        monkeypatch.setattr(pipeline_module, "load", load_own)
        monkeypatch.setattr(holder, "load", load_there)
        paused = asked(llm, with_layers(llm.layout, [1, 3]), 5)
        llm._engine.carry_out(submit)  # so that all are heard before the first step
        outputs = [request.result() for request in requests]
        assert ended == dict.fromkeys(("aborted", "late", "aborted while a worker loads"), True)
        assert [output.finish_reason for output in outputs] == ["abort", "abort", "abort", "length"]
        assert [output.error for output in outputs] == [None, "it timed out", None, None]
        assert outputs[3].token_ids == right
        assert paused[0].result(SECONDS) > 0
        assert llm._engine.pipeline.layout.cut == "1-3"
