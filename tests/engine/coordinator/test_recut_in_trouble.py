"""Another cut is asked for when something else goes wrong, or by several: no token changes, nobody waits for ever."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import stages
from processes import until

from splitinfer import SamplingParams
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.errors import PeerError, SplitinferError, WorkerLost
from splitinfer.llm import LLM, Settings
from splitinfer.llm.request import Request
from splitinfer.machine.selection import VARIABLE

QUICK = Path(__file__).parents[2] / "quick_accelerator.yaml"
SECONDS = 60.0
LENGTHS = (9, 14, 23)


@pytest.fixture
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama")


def submit(llm: LLM, at: int = 5) -> list[Request]:
    """Requests under way, the first of which has ``at`` tokens."""
    params = [SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.9 * (i > 0), seed=i) for i in range(3)]
    requests = [llm.submit(stages.prompt(n), each) for n, each in zip(LENGTHS, params, strict=True)]
    first = requests[0]._state.sequence  # a reader that leaves early aborts its request
    until(lambda: first.num_generated >= at, f"token {at}", SECONDS)
    return requests


def tokens(requests: list[Request]) -> list[list[int]]:
    outputs = [request.result() for request in requests]
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny_folder: Callable[..., Path]) -> list[list[int]]:
    with stages.pipeline(tiny_folder("llama"), [4]) as llm:
        return tokens(submit(llm))


def test_a_cut_that_does_without_a_lost_worker(folder: Path, alone: list[list[int]]):
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack, stages.worker("inproc") as other:
        address = stack.enter_context(stages.worker("inproc"))
        start = stages.layout(folder, [2, 2], [address])
        with LLM(start, settings=Settings(rejoin_timeout=600)) as llm:
            requests = submit(llm)
            stack.close()  # the worker ends, and nobody starts it again
            until(lambda: llm.health().waits_for is not None, "the loss", SECONDS)
            with pytest.raises(SplitinferError, match="inproc://nobody"):
                pool.submit(llm.recut, stages.layout(folder, [2, 2], ["inproc://nobody"])).result(SECONDS)
            assert pool.submit(llm.recut, stages.layout(folder, [3, 1], [other])).result(SECONDS) > 0
            assert tokens(requests) == alone
            assert llm.health().can_answer
            assert llm.layout.cut == "3-1"


@pytest.mark.parametrize("error", [WorkerLost("gone"), RuntimeError("a surprise")])
def test_what_fails_in_the_middle_leaves_the_cut_before(
    folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """The first two attempts fail: the other cut, and the one before; the third is waited for."""
    opened, left = Pipeline.open, [error, WorkerLost("still gone")]

    def fail(self: Pipeline, *args: Any, **more: Any) -> None:
        if left:
            raise left.pop(0)
        opened(self, *args, **more)

    with stages.pipeline(folder, [2, 2], draft="ngram", rejoin_timeout=600) as llm:
        requests = submit(llm)
        monkeypatch.setattr(Pipeline, "open", fail)
        with pytest.raises(SplitinferError, match=str(error)):
            llm.recut([3, 1])
        assert tokens(requests) == alone
        assert not left
        assert (llm.layout.cut, llm._engine.pipeline.layout.cut) == ("2-2", "2-2")
        assert llm.health().can_answer
        assert llm.recut([3, 1]) > 0
        assert tokens(submit(llm)) == alone


def test_several_at_once(folder: Path, alone: list[list[int]]):
    with stages.pipeline(folder, [2, 2]) as llm, ThreadPoolExecutor(4) as pool:
        requests = submit(llm)
        asked = [pool.submit(llm.recut, cut) for cut in ([1, 3], [3, 1], [2, 2], [1, 3])]
        assert all(each.result(SECONDS) > 0 for each in asked)
        assert tokens(requests) == alone
        assert llm.layout.cut == llm._engine.pipeline.layout.cut
        engine, layouts = llm._engine, [llm.layout, llm.layout]
        assert all(paused > 0 for paused in pool.map(engine.recut, layouts)), "the engine itself takes several, too"


def test_not_while_draining(folder: Path):
    with stages.pipeline(folder, [2, 2]) as llm:
        llm.drain(SECONDS)
        with pytest.raises(PeerError, match="the coordinator is shutting down and loads no other cut"):
            llm.recut([1, 3])
        assert llm.layout.cut == "2-2"


def test_closed_while_another_cut_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    opened, is_loading, may_go_on = list[str](), threading.Event(), threading.Event()

    def hang(self: Pipeline, *_args: Any, **_more: Any) -> None:
        opened.append(self.layout.cut)
        is_loading.set()
        assert may_go_on.wait(SECONDS)
        raise WorkerLost("the links were closed")

    with stages.pipeline(folder, [2, 2]) as llm, ThreadPoolExecutor(1) as pool:
        requests = submit(llm)
        monkeypatch.setattr(Pipeline, "open", hang)
        asked = pool.submit(llm.recut, [1, 3])
        assert is_loading.wait(SECONDS)
        assert llm.health().waits_for == "another cut of the layers"
        assert [stage.num_layers for stage in llm.layout.stages] == [2, 2]
        assert len(llm.stats()["stages"]) == 2
        llm.close()
        may_go_on.set()
        with pytest.raises(PeerError, match="the pipeline was closed"):
            asked.result(SECONDS)
        assert {request.result().finish_reason for request in requests} <= {"abort", "length"}, "all end"
        assert opened == ["1-3"], "the cut before is not opened again"
        llm._engine._thread.join(SECONDS)
        assert not llm._engine._thread.is_alive()


def test_on_devices_that_compute_ahead_with_drafts(
    folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(QUICK))
    with stages.pipeline(folder, [2, 2], draft="ngram") as llm:
        requests = submit(llm)
        for cut in ([1, 3], [3, 1], [2, 2]):
            llm.recut(cut)
        assert tokens(requests) == alone
