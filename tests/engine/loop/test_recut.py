"""Another cut is loaded while requests are under way, also when something else goes wrong, or several ask at once:
requests wait and get the same tokens, and nobody waits for ever."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import failing
import pytest
import stages
from engine.door import QUICK, SECONDS, SEVERAL, Fault, Open, Pipeline, ask, launches_ahead, recut
from processes import until
from tiny import Folder

from splitinfer.errors import LayoutError, PeerError, SplitinferError
from splitinfer.kvstore.store import Disk

NIGHTLY = pytest.mark.nightly
LONG = [replace(one, params=replace(one.params, max_tokens=30)) for one in SEVERAL]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


ROWS: dict[str, tuple[Fault, dict[str, Any]]] = {
    "once": (recut([1, 3]), {"scheme": "tcp"}),
    "there and back": (recut([3, 1], [2, 2]), {"draft": "ngram"}),
    "computing ahead": (recut([1, 3], [3, 1], [2, 2]), {"draft": "ngram", "accelerator": QUICK}),
}
MORE: dict[str, tuple[Fault, dict[str, Any]]] = {
    f"at token {at}": (replace(recut([1, 3], [3, 1]), at=at), {"micro_batches": 1 + at % 3}) for at in range(1, 16)
} | {
    "ahead": (replace(launches_ahead(), act=recut([1, 3]).act), {}),
    "in short blocks": (recut([1, 3], at=12), {"block": 8}),
    "in few bits": (recut([1, 3]), {"kv_format": "k8v8"}),
    "twenty times": (recut(*([1, 3], [3, 1]) * 10), {}),
}


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(name, marks=NIGHTLY) for name in MORE)])
def test_no_token_changes(row: str, pipeline: Open, tiny_folder: Folder) -> None:
    fault, options = {**ROWS, **MORE}[row]
    model = tiny_folder("llama", head_dim=32) if "kv_format" in options else "llama"
    with pipeline(model, [2, 2], fault=fault, **options) as there:
        before = there.llm.fingerprint, there.llm.layout.cut
        there.answers()
        assert (there.llm.fingerprint == before[0]) == (there.llm.layout.cut == before[1]), "tokens may depend on it"
        assert there.llm.health().can_answer
        assert there.stats["rejoins"] == 0
        assert len(there.stats["stages"]) == 2


def test_with_other_stages(pipeline: Open) -> None:
    """From two stages to three, and then to one, and back to two in another order."""
    with stages.worker("inproc") as other, pipeline("llama", [2, 2], draft="ngram") as there:
        model, first = there.llm.layout.model, there.workers[0].address
        for cuts, addresses in ([1, 1, 2], [first, other]), ([4], []), ([2, 2], [other]):
            requests = there.submit(*LONG)
            there.read(requests[0], 10)
            assert there.llm.recut(stages.layout(model, cuts, addresses)) > 0
            there.finish()
            assert len(there.stats["costs"]["stages"]) == there.llm.layout.num_stages == len(cuts)
        assert there.stats["speculation"]["drafted"] > 0


def test_kv_on_disk_is_used_where_every_stage_has_its_layers(tmp_path: Path, pipeline: Open) -> None:
    disks = [Disk(tmp_path / name, 10**9) for name in "ab"]
    prompt = ask(3 * 64, max_tokens=8)
    with pipeline("llama", [2, 2], disks=disks, token_budget=64, block=64) as there:
        cached = [there.outputs(prompt)[0].num_cached_tokens]
        for cut in ([1, 3], [2, 2], [1, 3]):
            there.llm.recut(cut)
            cached.append(there.outputs(prompt)[0].num_cached_tokens)
    assert cached == [0, 0, 191, 191]


def test_a_cut_that_cannot_be_loaded_leaves_the_one_before(pipeline: Open) -> None:
    with pipeline("llama", [2, 2], connect_timeout=0.3) as there:
        nobody = stages.layout(there.llm.layout.model, [1, 1, 2], [there.workers[0].address, "inproc://nobody"])
        requests = there.submit(*LONG)
        there.read(requests[0], 10)
        with pytest.raises(SplitinferError, match="inproc://nobody"):
            there.llm.recut(nobody)
        there.finish()
        assert there.llm.layout.cut == "2-2"
        for cut, words in (([4], "is for 1 stages"), ([1, 2], "but the model has 4"), ([4, 0], "needs at least 1")):
            with pytest.raises(LayoutError, match=words):
                there.llm.recut(cut)
        there.answers()
    with pytest.raises(SplitinferError, match="the pipeline was closed"):
        there.llm.recut([1, 3])


def test_what_fails_while_it_loads_leaves_the_cut_before(pipeline: Open) -> None:
    """The other cut and the first attempt at the one before lose their worker; the next attempt is waited for."""
    losses, there = [0], list[Pipeline]()

    def notice(name: str, _progress: object) -> None:
        if name == "s0" and losses[0] > 0:
            losses[0] -= 1
            there[0].cut()

    with pipeline("llama", [2, 2], notice=notice, draft="ngram", rejoin_timeout=60) as opened:
        there.append(opened)
        requests = opened.submit(*LONG)
        opened.read(requests[0], 5)
        losses[0] = 2
        with pytest.raises(SplitinferError, match="s1"):
            opened.llm.recut([3, 1])
        opened.finish()
        assert losses == [0]
        assert opened.llm.layout.cut == "2-2"
        assert opened.llm.recut([3, 1]) > 0
        opened.answers()


def test_a_cut_that_does_without_a_lost_worker(pool: ThreadPoolExecutor, pipeline: Open) -> None:
    with stages.worker("inproc") as other, pipeline("llama", [2, 2], connect_timeout=0.3, rejoin_timeout=600) as there:
        model = there.llm.layout.model
        requests = there.submit(*LONG)
        there.read(requests[0], 5)
        there.workers[0].stop()  # nobody starts it again
        until(lambda: there.llm.health().waits_for is not None, "the loss", SECONDS)
        there.llm.tune(token_budget=7)
        with pytest.raises(SplitinferError, match="inproc://nobody"):
            pool.submit(there.llm.recut, stages.layout(model, [2, 2], ["inproc://nobody"])).result(SECONDS)
        assert pool.submit(there.llm.recut, stages.layout(model, [3, 1], [other])).result(SECONDS) > 0
        there.finish()
        assert there.llm.health().can_answer
        assert (there.llm.layout.cut, there.stats["token_budget"]) == ("3-1", 7)


@pytest.mark.parametrize("cuts", [[2, 2], pytest.param([1, 1, 2], marks=NIGHTLY)], ids=str)
def test_the_others_go_on_without_a_lost_worker_and_with_it_again(cuts: list[int], pipeline: Open) -> None:
    """The tokens stay (the door checks them), and so does the memory."""
    patience = {"leave_after": 0.5, "rejoin_timeout": 60.0, "connect_timeout": 0.3}
    with pipeline("llama", cuts, draft="ngram", **patience) as there:
        requests = there.submit(*LONG, ask(40, max_tokens=100, temperature=0.9))
        there.read(requests[0], 5)
        there.workers[-1].stop()
        until(lambda: there.llm.health().absent is not None, "it is left out", SECONDS)
        assert str(there.llm.health().absent).startswith(f"s{len(cuts) - 1} is gone. s0")
        assert there.llm.layout.num_stages < len(cuts)
        there.read(requests[1], 10)
        there.workers[-1].start()
        there.finish()
        until(lambda: there.llm.health().absent is None, "it takes part again", SECONDS)
        assert there.llm.layout.cut == "-".join(map(str, cuts))
        there.answers()


def test_requests_end_while_another_cut_is_loaded(pool: ThreadPoolExecutor, pipeline: Open) -> None:
    """One is aborted, and the time of one is over, while a worker reads its layers."""
    held = failing.HeldLoading(1)
    with pipeline("llama", [2, 2], fault=Fault(lambda: held), max_running=4) as there:
        long = ask(9, max_tokens=120)
        first, late, other = there.submit(long, replace(long, timeout=0.5), SEVERAL[1])
        there.read(other, 1)  # so that the loop has all three: while stages load, it hears of no new request
        held.is_held = True
        paused: Future[float] = pool.submit(there.llm.recut, [1, 3])
        assert held.waits.wait(SECONDS)
        assert there.llm.health().waits_for == "another cut of the layers"
        assert (there.llm.layout.cut, len(there.stats["stages"])) == ("2-2", 2)
        first.abort()
        assert (first.result().finish_reason, late.result().error) == ("abort", "it timed out")
        assert not paused.done()
        held.goes_on.set()
        assert paused.result(SECONDS) > 0
        assert other.result().finish_reason == "length"


def test_closed_while_another_cut_is_loaded(pool: ThreadPoolExecutor, pipeline: Open) -> None:
    loading, may_go_on, seen = threading.Event(), threading.Event(), list[str]()
    may_go_on.set()

    def notice(name: str, _progress: object) -> None:
        if not may_go_on.is_set():
            seen.append(name)
            loading.set()
            may_go_on.wait(SECONDS)

    with pipeline("llama", [2, 2], notice=notice) as there:
        requests = there.submit(*LONG)
        there.read(requests[0], 5)
        may_go_on.clear()
        paused = pool.submit(there.llm.recut, [1, 3])
        assert loading.wait(SECONDS)
        there.llm.close()
        may_go_on.set()
        with pytest.raises(PeerError, match="the pipeline was closed"):
            paused.result(SECONDS)
        there.finish()
        assert {request.output.finish_reason for request in requests} <= {"abort", "length"}
