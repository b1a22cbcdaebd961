"""A few of the tests of tokens on devices that compute while their hosts go on (``quick_accelerator.yaml``). All tests
of the engine and of real processes can be run so: ``scripts/test --accelerator FILE``."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.drafts.test_drafts import Dice
from engine.test_mixed import check, cluster, submit_all, wishes
from processes import until
from stages import pipeline, plain_greedy, prompt, tokens_of

from splitinfer import LLM, Flight, SamplingParams, Settings
from splitinfer.core.layout import LOCAL
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.engine.links import setup
from splitinfer.engine.stage import sampler
from splitinfer.machine.selection import VARIABLE
from splitinfer.models import kv_pool
from splitinfer.system.gpu_roads import Road
from transports import LinkOptions

FILE = Path(__file__).parents[1] / "quick_accelerator.yaml"


@pytest.fixture(autouse=True)
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(FILE))


def is_emulated(llm: LLM) -> bool:
    return isinstance(llm._engine.pipeline.own.device, EmulatedDevice)


def test_requests_of_every_kind_at_once(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, wished = tiny_folder("llama"), wishes(7, 16, longest=120)
    with monkeypatch.context() as plain:
        plain.delenv(VARIABLE)
        with pipeline(folder, [4], prefix_cache=False) as whole:
            assert not is_emulated(whole)
            alone = [whole.generate(wish.tokens, wish.params)[0].token_ids for wish in wished]
    with cluster(folder, [2, 2], Settings(token_budget=48, max_running=12)) as running:
        assert is_emulated(running.llm)
        for request, wish, tokens in zip(submit_all(running.llm, wished), wished, alone, strict=True):
            check(request, wish, tokens)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_windows_and_states(name: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name)
    expected = plain_greedy(folder, prompt(16), 40)
    with pipeline(folder, [1, 2, 1 if name == "qwen3_next" else 3], "tcp", token_budget=16) as llm:
        assert is_emulated(llm)
        assert tokens_of(llm, prompt(16), max_tokens=40) == expected


def test_full_groups_launch_the_expected_step_first(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a result has come before the loop could wait for it."""
    went_on, learned = list[Any](), list[Any]()
    go_on, learn = Loop._go_on, Loop._learn
    monkeypatch.setattr(Loop, "_go_on", lambda *args: (went_on.append(1), go_on(*args)))
    monkeypatch.setattr(Loop, "_learn", lambda *args: (learned.append(1), learn(*args)))
    with pipeline(tiny_folder("llama"), [2, 2], prefix_cache=False) as llm:
        monkeypatch.setattr(llm._engine._loop, "_use_idle_time", lambda: time.sleep(0.003))
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        llm.generate([prompt(8 + number) for number in range(8)], params)
    assert len(learned) > 60
    assert len(went_on) > 0.8 * len(learned)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take so long, and launches so little, that the next step is launched long before a step ends."""
    (tmp_path / "slow.yaml").write_text("{each_layer: {rows_ms: {1: 1}}, each_step_ms: 6, max_buffers: 100}")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "slow.yaml"))


@pytest.mark.parametrize(("cuts", "groups"), [([4], 2), ([1, 2, 1], 3)], ids=["one stage", "three"])
@pytest.mark.usefixtures("slow")
def test_drafts(cuts: list[int], groups: int, tiny_folder: Callable[..., Path]) -> None:
    """One stage with two groups has blocks of drafts behind each other, as several stages do. A block is built before
    the verdict on the one before it."""
    dice, tokens = Dice(0.7), prompt(40)
    expected = plain_greedy(tiny_folder("llama"), tokens, 40)
    dice.answers[tuple(tokens)] = expected
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with pipeline(tiny_folder("llama"), cuts, drafter=lambda: dice, micro_batches=groups) as llm:
        assert is_emulated(llm)
        for flight in (None, Flight(4), Flight(3, 4, 3)):
            assert llm.submit(tokens, params, flight=flight).result().token_ids == expected, flight
        assert llm.stats()["speculation"]["accepted"] > 20


@pytest.mark.long
def test_a_worker_of_our_own_is_killed() -> None:
    """A real process, in the middle of many steps under way."""
    stages = [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": LOCAL}]
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, seed=2)
    with LLM({"model": "demo", "stages": stages}) as llm:
        assert is_emulated(llm)
        expected = [output.token_ids for output in llm.generate(["The king", "A dog", "Once"], params)]
        requests = [llm.submit(text, params) for text in ("The king", "A dog", "Once")]
        events = iter(requests[0])
        for _ in range(9):
            next(events)
        llm._engine.pipeline._locals["b"].kill()
        assert [request.result().token_ids for request in requests] == expected
        assert llm.stats()["rejoins"] == 1


def test_what_ended_is_freed(tiny_folder: Callable[..., Path]) -> None:
    """Graphs that were built ahead for it, too."""
    with cluster(tiny_folder("llama"), [2, 2], Settings()) as running:
        assert len(tokens_of(running.llm, prompt(30), max_tokens=20)) == 20
        until(running.is_empty, "nothing is held", 10)


@pytest.mark.usefixtures("slow")
def test_the_loop_waits_for_steps_that_the_waiter_waits_for(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with every chunk of a long prompt, whose KV must not be copied."""
    monkeypatch.setattr(kv_pool, "MAX_COPIED", 0)
    folder = tiny_folder("llama")
    expected = plain_greedy(folder, prompt(90), 12)
    with pipeline(folder, [2, 2], token_budget=8) as llm:
        assert is_emulated(llm)
        assert tokens_of(llm, prompt(90), max_tokens=12) == expected


@pytest.mark.parametrize("road", [Road.LAUNCH_AHEAD, Road.WAITER, Road.PREPARED_STEPS])
def test_each_road_can_be_closed(
    road: Road, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    """Tokens stay, and only that road is not taken."""
    folder, tokens = tiny_folder("llama"), [prompt(n) for n in (8, 9)]
    expected = [plain_greedy(folder, one, 12) for one in tokens]
    monkeypatch.setenv(road, "0")
    with pipeline(folder, [4], micro_batches=2) as llm:
        own, most, built = llm._engine.pipeline.own, 0, list[object]()
        launch, add = own.device.launch, own._prepared.add

        def counted(*args: Any) -> Any:
            nonlocal most
            most = max(most, sum(not step.is_done for step in llm._engine._loop.own_steps._steps.under_way()))
            return launch(*args)

        monkeypatch.setattr(own.device, "launch", counted)
        monkeypatch.setattr(own._prepared, "add", lambda step: (built.append(step), add(step)))
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        assert [one.token_ids for one in llm.generate(tokens, params)] == expected
        assert (most > 0) == (road is Road.PREPARED_STEPS), "another step was under way"
        assert not built or road is not Road.PREPARED_STEPS
        waits = any(thread.name == "waiter" for thread in threading.enumerate())
        assert waits == (road is not Road.WAITER)


def test_rdma_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(setup, "connect", lambda address, **_: tried.append(address))
    for closed in ("1", "0"):
        monkeypatch.setenv(Road.RDMA, closed)
        for fallback in ("", "tcp://mini:5"):
            setup.reach("rdma://mini:5?backend=ring", fallback, 1.0, LinkOptions())
    assert tried == ["rdma://mini:5?backend=ring"] * 2 + ["tcp://mini:5"] * 2


def test_the_sampler_is_compiled_on_a_gpu_unless_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "on_gpu", lambda: True)
    assert sampler.Sampler(8)._compiled
    monkeypatch.setenv(Road.COMPILED_SAMPLER, "0")
    assert not sampler.Sampler(8)._compiled
