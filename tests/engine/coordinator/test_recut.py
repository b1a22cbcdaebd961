"""Another cut is loaded while requests are under way: they wait, and no token changes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import stages
from processes import until

from splitinfer import SamplingParams
from splitinfer.engine.coordinator.open_requests import OpenRequests
from splitinfer.engine.stage import loader
from splitinfer.errors import LayoutError, SplitinferError
from splitinfer.llm import LLM

SECONDS = 20.0
PARAMS = [
    SamplingParams(max_tokens=32, ignore_eos=True),
    SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.9, seed=5),
    SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.9, seed=6, repetition_penalty=1.2),
]


def streams(llm: LLM, at: int, act: Callable[[], object]) -> list[list[int]]:
    """The tokens of some requests; ``act`` is called once the first has ``at`` tokens."""
    requests = [llm.submit(stages.prompt(9 + i), params) for i, params in enumerate(PARAMS)]
    events = iter(requests[0])
    for _ in range(at):
        next(events)
    act()
    for _ in events:
        pass
    return [requests[0].output.token_ids, *(request.result().token_ids for request in requests[1:])]


def hear(llm: LLM) -> None:
    """Wait until the loop has heard all it was told, or it would hear some of it after another cut only."""
    llm._engine.carry_out(lambda: None)


@pytest.fixture(scope="module")
def alone(tiny_folder: Callable[..., Path]) -> list[list[int]]:
    with stages.pipeline(tiny_folder("llama"), [4]) as llm:
        return streams(llm, 1, lambda: None)


@pytest.mark.parametrize("cut", [[1, 3], [3, 1]])
def test_no_token_changes(tiny_folder: Callable[..., Path], alone: list[list[int]], cut: list[int]):
    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm:
        paused = list[float]()
        assert streams(llm, 10, lambda: paused.append(llm.recut(cut))) == alone
        assert paused[0] > 0
        assert [stage.num_layers for stage in llm.layout.stages] == cut
        assert llm.health().failure is None
        assert streams(llm, 5, lambda: None) == alone
        assert len(llm.stats()["stages"]) == len(llm.stats()["window"]["stages"]) == 2


def test_what_was_tuned_stays_and_the_fingerprint_changes(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm:
        before = llm.fingerprint
        llm._engine.fix_groups(1)
        llm.tune(token_budget=7, max_running=2, policy="prefill_first")
        hear(llm)
        llm.recut([1, 3])
        stats = llm.stats()
        assert (stats["policy"], stats["token_budget"], stats["max_running"]) == ("prefill_first", 7, 2)
        groups = llm._engine.scheduler.state.groups
        assert (groups.most_groups, groups.fixed) == (1, True)
        assert llm.fingerprint != before, "a seed's tokens may depend on the cut"
        llm.tune(token_budget=None)
        hear(llm)
        monkeypatch.setattr(loader, "device_name", lambda: "Apple M4 Max")  # of the stages that are loaded now
        llm.recut([2, 2])
        assert llm.fingerprint == before
        assert llm.stats()["token_budget"] == 512, "a GPU gets longer steps, whenever the default was restored"


def test_a_cut_is_heard_whenever_it_is_asked_for(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    """In the middle of an idle turn: what wakes the loop for it is taken in by that turn, which waits at its end."""
    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm, ThreadPoolExecutor(1) as pool:
        expire, paused = OpenRequests.expire, list[Future[float]]()

        def ask_now(requests: OpenRequests) -> None:
            expire(requests)
            if not paused:
                paused.append(pool.submit(llm.recut, [1, 3]))
                until(lambda: not llm._engine._inbox.is_empty, "the loop is woken", SECONDS)
                llm._engine._loop._receive()

        monkeypatch.setattr(OpenRequests, "expire", ask_now)
        hear(llm)
        until(lambda: bool(paused), "a turn", SECONDS)
        assert paused[0].result(SECONDS) > 0


def test_with_other_stages_and_drafts(tiny_folder: Callable[..., Path], alone: list[list[int]]):
    """From two stages to three, and then to one, and back to two in another order."""
    with stages.worker("inproc") as first, stages.worker("inproc") as second:
        layouts = [
            stages.layout(tiny_folder("llama"), [1, 1, 2], [first, second]),
            stages.layout(tiny_folder("llama"), [4], []),
            stages.layout(tiny_folder("llama"), [2, 2], [second]),
        ]
        start = stages.layout(tiny_folder("llama"), [2, 2], [first]) | {"draft": "ngram"}
        with LLM(start) as llm:
            for layout in layouts:
                assert streams(llm, 10, partial(llm.recut, layout)) == alone
                assert llm.layout.num_stages == len(layout["stages"])
                assert len(llm.stats()["costs"]["stages"]) == len(layout["stages"])
            assert llm.stats()["speculation"]["drafted"] > 0


def test_a_cut_that_cannot_be_loaded_leaves_the_one_before(
    tiny_folder: Callable[..., Path], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm:
        there = [stage.address for stage in llm.layout.stages[1:]]
        nobody = stages.layout(tiny_folder("llama"), [1, 1, 2], [*there, "inproc://nobody"])
        said = list[str]()

        def act() -> None:
            with pytest.raises(SplitinferError) as caught:
                llm.recut(nobody)
            said.append(str(caught.value))

        llm.settings
        assert streams(llm, 10, act) == alone
        assert "inproc://nobody" in said[0]
        assert [stage.num_layers for stage in llm.layout.stages] == [2, 2]
        for cut, words in (([4], "is for 1 stages"), ([1, 2], "but the model has 4"), ([4, 0], "needs at least 1")):
            with pytest.raises(LayoutError, match=words):
                llm.recut(cut)


def test_whoever_waits_for_a_cut_hears_of_the_end(tiny_folder: Callable[..., Path]):
    with stages.pipeline(tiny_folder("llama"), [2, 2]) as llm:
        pass
    with pytest.raises(SplitinferError, match="the pipeline was closed"):
        llm.recut([1, 3])
