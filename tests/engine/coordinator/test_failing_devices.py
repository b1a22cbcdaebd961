"""A device that fails, has no memory left or stands still: requests go on from their tokens, or end with a sentence."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import failing
import mlx.core as mx
import pytest
from stages import layout, pipeline, prompt

from splitinfer.core import liveness
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator import loop as loop_module
from splitinfer.engine.coordinator import pipeline as pipeline_module
from splitinfer.engine.device.device import Device, Span, Ticket
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.stage import loader
from splitinfer.engine.worker.worker import Worker
from splitinfer.errors import DeviceFailed, SplitinferError
from splitinfer.llm import LLM, Settings
from transports import TransportError, listen

BROKEN = DeviceFailed("the device failed (command buffer: timeout)")
A_SEQUENCE = (
    2 * 2 * 2 * 256 * 16 * 4
)  # bytes of a block on a stage: layers, keys and values, heads, tokens, dims, float32
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
CUTS = [2, 2]


@pytest.fixture
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama")


def answers(llm: LLM, num_requests: int, length: int = 20) -> list[list[int]]:
    prompts = [prompt(length + i, seed=i) for i in range(num_requests)]
    return [output.token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.fixture
def expected(folder: Path) -> list[list[int]]:
    with pipeline(folder, [4], prefix_cache=False) as llm:
        return answers(llm, 12)


Make = Callable[..., Device]
HOW = pytest.mark.parametrize(
    "make",
    [
        lambda wish: failing.FailingDevice(computes_at_launch=False, at_launch=wish),
        lambda wish: failing.FailingDevice(computes_at_launch=False, at_wait=wish),
        lambda wish: failing.FailingDevice(computes_at_launch=True, at_launch=wish),
    ],
    ids=["launch", "wait", "computes at launch"],
)
WHERE = pytest.mark.parametrize("stage", [0, 1])


# -- no memory -------------------------------------------------------------------------------------


@HOW
@WHERE
def test_without_memory_fewer_run_at_a_time(
    stage: int, make: Make, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.use(monkeypatch, {stage: make(failing.beyond(int(3.5 * A_SEQUENCE)))})
    groups = {"micro_batches": 2}  # what fails is a step with too many sequences, so these must not change
    with pipeline(folder, CUTS, max_running=12, rejoin_timeout=0, prefix_cache=False, **groups) as llm:
        before = llm.kv_budget
        assert answers(llm, 12) == expected
        assert llm._engine.figures.totals.rejoins > 0
        assert llm.stats()["waiting"] == llm.stats()["running"] == 0
        now = llm._engine.scheduler.state.budget
        assert 3 * A_SEQUENCE <= now.stages[stage].budget_bytes < 12 * A_SEQUENCE
        assert now.stages[1 - stage] == before.stages[1 - stage]
        num = llm._engine.figures.totals.rejoins
        assert answers(llm, 12) == expected
        assert llm._engine.figures.totals.rejoins == num, "it knows by now"


@pytest.mark.parametrize("is_sent", [False, True], ids=["launch", "send"])
def test_no_token_comes_twice_where_the_step_that_was_expected_fails(
    is_sent: bool, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader has the token before it by then. A device that computes at launch sends at launch."""
    go_on, send, going_on, once = loop_module.Loop._go_on, pipeline_module.send_step, list[bool](), iter([True])

    def goes_on(loop: loop_module.Loop, *args: Any) -> None:
        going_on.append(True)
        try:
            go_on(loop, *args)
        finally:
            going_on.clear()

    def sends(*args: Any) -> None:
        if is_sent and going_on and next(once, False):
            raise TransportError("torn")
        send(*args)

    def fails(_arrays: Sequence[mx.array]) -> Exception | None:
        return DeviceFailed("none", True) if not is_sent and going_on and next(once, False) else None

    monkeypatch.setattr(loop_module.Loop, "_go_on", goes_on)
    monkeypatch.setattr(pipeline_module, "send_step", sends)
    failing.use(monkeypatch, {0: failing.FailingDevice(computes_at_launch=is_sent, at_launch=fails)})
    with pipeline(folder, CUTS, prefix_cache=False) as llm:
        assert answers(llm, 2) == expected[:2]
        assert llm._engine.figures.totals.rejoins == 1


def test_stored_blocks_go_when_there_is_no_memory(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In one group they take 28 steps, in two more: the 20th is behind the prompts, and never the last.
    failing.use(
        monkeypatch,
        {0: failing.FailingDevice(computes_at_launch=False, at_launch=failing.nth(20, DeviceFailed("none", True)))},
    )
    with pipeline(folder, CUTS, max_running=12) as llm:
        assert answers(llm, 12) == expected
        assert llm._engine.figures.totals.rejoins == 1


@WHERE
def test_a_request_that_does_not_fit_alone_ends_alone(
    stage: int, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = failing.FailingDevice(computes_at_launch=False, at_wait=failing.beyond(int(1.5 * A_SEQUENCE)))
    failing.use(monkeypatch, {stage: device})
    with pipeline(folder, CUTS, max_running=12, prefix_cache=False) as llm:
        long = llm.submit(prompt(300), PARAMS)
        assert answers(llm, 5) == expected[:5]
        output = long.result()
        assert output.finish_reason == "error"
        assert output.error is not None
        assert f"tokens need 262 kB of KV on stage s{stage}, whose device ran out of memory and has 1" in output.error
        assert answers(llm, 3) == expected[:3]


def test_who_runs_out_of_memory_says_so_on_both_sides(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = failing.FailingDevice(computes_at_launch=False, at_launch=failing.beyond(int(3.5 * A_SEQUENCE)))
    failing.use(monkeypatch, {1: device})
    with caplog.at_level(logging.WARNING), pipeline(folder, CUTS, max_running=12) as llm:
        assert answers(llm, 12) == expected
    said = [record.message for record in caplog.records]
    assert any(line.startswith("session ended: the device has no memory left (") for line in said)
    first = next(line for line in said if line.startswith("worker s1 (inproc://"))
    assert "cannot go on: the device has no memory left (" in first
    assert "it gets" in first
    assert "of KV from now on, and fewer requests at a time" in first


# -- failures --------------------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize("cuts", [[4], CUTS], ids=["alone", "two stages"])
@pytest.mark.parametrize("number", [1, 7])
def test_the_coordinators_device_fails_once(
    number: int, cuts: list[int], make: Make, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.use(monkeypatch, {0: make(failing.nth(number, BROKEN))})
    with pipeline(folder, cuts, max_running=3) as llm:
        assert answers(llm, 5) == expected[:5]
        assert llm._engine.figures.totals.rejoins == 1


def test_results_from_before_a_failure_are_not_taken_for_later_ones(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch fails while the result of the step before it is already there."""
    fail = failing.nth(2, BROKEN)

    def slowly(arrays: Sequence[mx.array]) -> Exception | None:
        error = fail(arrays)
        if error is not None:
            time.sleep(0.1)  # the step before it is done meanwhile
        return error

    failing.use(monkeypatch, {0: failing.FailingDevice(computes_at_launch=False, at_launch=slowly)})
    with pipeline(folder, [4], token_budget=8) as llm:
        assert answers(llm, 1) == expected[:1]
        assert llm._engine.figures.totals.rejoins == 1


def test_the_coordinators_device_fails_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = failing.FailingDevice(computes_at_launch=False, at_wait=lambda arrays: BROKEN if arrays else None)
    failing.use(monkeypatch, {0: device})
    with caplog.at_level(logging.WARNING), pipeline(folder, CUTS) as llm:
        output = llm.generate(prompt(20), PARAMS)[0]
        assert output.finish_reason == "error"
        assert output.error == "stage s0 cannot go on: the device failed (command buffer: timeout)"
        with pytest.raises(SplitinferError, match="stage s0 cannot go on"):
            llm.submit(prompt(20), PARAMS)
    again = [record.message for record in caplog.records if "it recomputes what it held" in record.message]
    assert len(again) == liveness.MAX_LOSSES_IN_A_ROW


def test_a_workers_device_fails_and_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its process does then; what follows for local ones is in ``tests/cluster/test_failing_workers.py``."""
    failing.use(monkeypatch, {1: failing.FailingDevice(computes_at_launch=False, at_wait=failing.nth(4, BROKEN))})
    listener, ended = listen("inproc://it-ends"), list[str]()
    worker = Worker(listener, ended=lambda: ended.append("ended"))
    with LLM(layout(folder, CUTS, [listener.address]), settings=Settings(rejoin_timeout=0)) as llm:
        output = llm.generate(prompt(20), PARAMS)[0]
        assert output.error == "worker s1 (inproc://it-ends) cannot go on: the device failed (command buffer: timeout)"
        assert len(output.token_ids) in (2, 3), "those before it"
    assert worker.stop(timeout=5)
    assert ended == ["ended"]
    assert not worker.is_alive


def test_memory_that_a_graph_lacks_is_no_fault_of_the_program(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building allocates, too: what it raises is a lack of memory, not a bug."""
    from splitinfer.engine.stage.runner import StageRunner

    failing.use(monkeypatch, {})
    build, left = StageRunner._build, [20]

    def short(self: StageRunner, *args: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")
        return build(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StageRunner, "_build", short)
    with pipeline(folder, CUTS, max_running=3) as llm:
        assert answers(llm, 5) == expected[:5]
        assert llm._engine.figures.totals.rejoins == 1


# -- standing still --------------------------------------------------------------------------------


def test_the_coordinators_device_stands_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in its process can make it go on, so this ends with a sentence, alone or not."""
    monkeypatch.setattr(liveness, "_BEYOND", 0.3)
    monkeypatch.setattr(liveness, "_UNKNOWN", 0.3)
    monkeypatch.setattr(loop_module, "WATCH_EVERY", 0.1)
    for cuts in ([4], CUTS):
        stuck = failing.StuckDevice(4)
        failing.use(monkeypatch, {0: stuck})
        with pipeline(folder, cuts) as llm:
            output = llm.generate(prompt(20), PARAMS)[0]
            assert output.error is not None
            assert output.error.startswith("the device of stage s0 has made no progress for 0 s; start the coordinator")
        stuck.goes_on.set()


# -- kept awake ------------------------------------------------------------------------------------


class Ticked(MlxDevice):
    """Notes when it was kept awake."""

    def __init__(self) -> None:
        super().__init__(computes_at_launch=False)
        self.ticks: list[float] = []

    def stay_awake(self) -> None:
        self.ticks.append(time.monotonic())
        super().stay_awake()


def test_devices_are_kept_awake_while_requests_are_open_and_not_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage's waits for the last one's, which takes a second for a step; then nothing is open."""
    monkeypatch.setattr("splitinfer.engine.stage.runner._TICK_EVERY", 0.05)
    own, slow = Ticked(), Ticked()
    wait = slow.wait

    def slowly(ticket: Ticket) -> Span:
        if ticket.span is None:
            time.sleep(0.3)
        return wait(ticket)

    monkeypatch.setattr(slow, "wait", slowly)
    monkeypatch.setattr(loader, "open_device", lambda stage, _bounds: (own, slow)[stage])
    with pipeline(folder, CUTS) as llm:
        time.sleep(0.15)
        assert (own.ticks, slow.ticks) == ([], []), "nothing is open"
        llm.generate(prompt(5), SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(own.ticks) >= 4
        gaps = [after - before for before, after in zip(own.ticks, own.ticks[1:], strict=False)]
        assert min(gaps) >= 0.04
        time.sleep(0.1)  # what ended is freed
        there = len(own.ticks), len(slow.ticks)
        time.sleep(0.3)
        assert (len(own.ticks), len(slow.ticks)) == there, "none is needed any more"


@pytest.mark.own_device
def test_a_device_that_computes_at_launch_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitinfer.engine.stage.runner._TICK_EVERY", 0.0)
    monkeypatch.setattr(MlxDevice, "stay_awake", lambda _self: pytest.fail("it is a processor"))
    with pipeline(folder, CUTS) as llm:
        assert llm.generate(prompt(5), PARAMS)[0].finish_reason == "length"
