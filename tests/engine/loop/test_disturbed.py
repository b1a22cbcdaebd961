"""Stages, what goes wrong, and options: requests get the tokens that they get undisturbed, or end with one sentence.
The door (``engine.door``) checks the tokens, and that nothing is left."""

import time
from dataclasses import replace
from typing import Any

import failing
import mlx.core as mx
import mlx.nn as nn
import pytest
from engine.door import (
    BROKEN,
    NO_MEMORY,
    NOTHING,
    QUICK,
    SECONDS,
    WAYS,
    Fault,
    Open,
    Pipeline,
    ask,
    device_fails,
    link_cut,
    no_memory,
    stands_still,
    worker_lost,
)  # fmt: skip
from processes import until
from tiny import Folder

from splitinfer.engine.worker import worker
from splitinfer.engine.worker.handshake import Acceptor
from splitinfer.errors import SplitinferError

NIGHTLY = pytest.mark.nightly
CUTS = [2, 2]
A_SEQUENCE = 2 * 2 * 2 * 256 * 16 * 4  # bytes on a stage: layers, keys and values, heads, tokens, dims, float32
MANY = [
    ask(20 + i, prompt=i, seed=i, max_tokens=12, temperature=0.7, repetition_penalty=1.1 + i % 2 / 10)
    for i in range(12)
]


def again_and_again(*faults: Fault) -> Fault:
    """All of them, one after the other."""
    return Fault(act=lambda there: [fault.act(there) for fault in faults if fault.act])


ROWS: dict[str, tuple[list[int], Fault, dict[str, Any]]] = {
    "its first launch fails": (CUTS, device_fails(0, 1, "launch"), {}),
    "a wait fails": ([4], device_fails(0, 7), {}),
    "a launch that computes fails": (CUTS, device_fails(0, 7, "computes at launch"), {}),
    "no memory on a worker": (CUTS, device_fails(1, 9, "wait", NO_MEMORY), {"token_budget": 16}),
    "no memory behind blocks that are kept": (CUTS, device_fails(0, 12, "launch", NO_MEMORY), {}),
    "a link is cut": (CUTS, link_cut(), {}),
    "a link is cut over tcp": ([1, 2, 1], link_cut(2), {"scheme": "tcp", "prefix_cache": False}),
    "a worker is lost": (CUTS, worker_lost(), {"draft": "ngram"}),
    "again and again": (CUTS, again_and_again(link_cut(), worker_lost(), link_cut()), {"block": 8}),
}
MORE: dict[str, tuple[list[int], Fault, dict[str, Any]]] = {
    "undisturbed, three": ([1, 2, 1], NOTHING, {"scheme": "tcp"}),
    "a worker of three is lost": ([1, 2, 1], worker_lost(1, at=1), {"token_budget": 8}),
} | {
    f"{name}, with {' '.join(options)}": (cuts, fault, {**given, **options})
    for name, (cuts, fault, given) in ROWS.items()
    for options in (
        {"draft": "ngram"}, {"kv_format": "k8v8"}, {"block": 8, "kv_bytes": 512 * 120}, {"accelerator": QUICK},
        {"micro_batches": 3}, {"policy": "prefill_first", "token_budget": 5},
    )
} | {
    f"{way}, step {number}, {cuts}": (cuts, device_fails(0, number, way, error), {"max_running": 2})
    for way in WAYS for number in range(1, 20, 2) for cuts in ([4], CUTS) for error in (BROKEN,)
}  # fmt: skip


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(name, marks=NIGHTLY) for name in MORE)])
def test_no_token_changes(row: str, pipeline: Open, tiny_folder: Folder) -> None:
    cuts, fault, options = {**ROWS, **MORE}[row]
    model = tiny_folder("llama", head_dim=32) if "kv_format" in options else "llama"
    with pipeline(model, cuts, fault=fault, rejoin_timeout=20, **options) as there:
        there.answers()
        assert (there.stats["rejoins"] > 0) == (fault is not NOTHING)
        assert sum(there.stats["losses"].values()) == there.stats["rejoins"]
        assert there.llm.health().can_answer


@pytest.mark.parametrize(("stage", "way"), [(0, "launch"), *(pytest.param(1, way, marks=NIGHTLY) for way in WAYS)])
def test_without_memory_fewer_run_at_a_time(stage: int, way: str, pipeline: Open) -> None:
    # What fails is a step with too many sequences, so the groups must not change.
    options = {"max_running": 12, "rejoin_timeout": 0, "prefix_cache": False, "micro_batches": 2}
    with pipeline("llama", CUTS, fault=no_memory(stage, 3.5 * A_SEQUENCE, way), **options) as there:
        before = there.stats["stages"]
        there.answers(*MANY)
        stats = there.stats
        assert stats["rejoins"] > 0
        assert 3 * A_SEQUENCE <= stats["stages"][stage]["kv_budget_bytes"] < 12 * A_SEQUENCE
        assert stats["stages"][1 - stage]["kv_budget_bytes"] == before[1 - stage]["kv_budget_bytes"]
        there.answers(*MANY)
        assert there.stats["rejoins"] == stats["rejoins"], "it knows by now"


def test_memory_that_a_graph_lacks_is_no_fault_of_the_program(pipeline: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building allocates, too."""
    norm, left = nn.RMSNorm.__call__, [60]

    def short(layer: nn.RMSNorm, x: mx.array) -> mx.array:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("[malloc] Unable to allocate 4096 bytes.")
        return norm(layer, x)

    with pipeline("llama", CUTS) as there, monkeypatch.context() as patch:
        patch.setattr(nn.RMSNorm, "__call__", short)
        there.answers()
        assert there.stats["rejoins"] == 1


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=NIGHTLY)])
def test_a_request_that_does_not_fit_alone_ends_alone(stage: int, pipeline: Open) -> None:
    with pipeline("llama", CUTS, fault=no_memory(stage, 1.5 * A_SEQUENCE, "wait"), prefix_cache=False) as there:
        long, *others = there.outputs(ask(300), *MANY[:5])
        assert long.finish_reason == "error"
        need = f"tokens need 262 kB of KV on stage s{stage}, whose device ran out of memory and has 1"
        assert need in str(long.error)
        assert {output.finish_reason for output in others} == {"length"}
        there.answers(*MANY[:3])


# -- failures that stay ----------------------------------------------------------------------------


def test_a_device_that_fails_for_ever_ends_with_a_sentence(pipeline: Open) -> None:
    fault = Fault(lambda: {0: WAYS["wait"](lambda arrays: BROKEN if arrays else None)})
    with pipeline("llama", CUTS, fault=fault) as there:
        (output,) = there.outputs(ask())
        assert output.error == "stage s0 cannot go on: the device failed (command buffer: timeout)"
        with pytest.raises(SplitinferError, match="stage s0 cannot go on"):
            there.submit(ask())
        assert there.stats["losses"]["s0"] > 2, "it was tried again before"


def test_a_worker_whose_device_fails_ends(pipeline: Open) -> None:
    """As its process does then."""
    with pipeline("llama", CUTS, fault=device_fails(1, 4), rejoin_timeout=0) as there:
        (output,) = there.outputs(ask(20))
        address = there.workers[0].address
        assert output.error == f"worker s1 ({address}) cannot go on: the device failed (command buffer: timeout)"
        assert len(output.token_ids) in (2, 3), "those before it"
        until(lambda: not there.workers[0].worker.is_alive, "the worker's end", SECONDS)


@pytest.mark.parametrize("cuts", [[4], CUTS])
def test_a_device_that_stands_still_ends_with_a_sentence(cuts: list[int], pipeline: Open) -> None:
    """Nothing in its process can make it go on."""
    with pipeline("llama", cuts, fault=stands_still(0, 4)) as there:
        (output,) = there.outputs(ask(20))
        assert "the device of stage s0 has made no progress for" in str(output.error)
        assert "start the coordinator" in str(output.error)


def test_a_worker_that_does_not_come_back_is_waited_for_so_long(pipeline: Open) -> None:
    fault = Fault(act=lambda there: there.workers[0].stop())
    with pipeline("llama", CUTS, fault=fault, rejoin_timeout=0.3, connect_timeout=0.3) as there:
        first, *others = there.outputs(*(replace(one, params=replace(one.params, max_tokens=80)) for one in MANY[:2]))
        assert "s1" in str(first.error)
        assert {output.finish_reason for output in (first, *others)} == {"error"}
        assert not there.llm.health().can_answer


def test_a_worker_that_hangs_as_it_comes_back_is_waited_for_so_long(pipeline: Open) -> None:
    """Its heartbeats go on."""
    held = failing.HeldLoading(1)

    def act(there: Pipeline) -> None:
        held.is_held = True
        there.workers[0].stop()
        there.workers[0].start()

    with pipeline("llama", CUTS, fault=Fault(lambda: held, act), rejoin_timeout=0.5) as there:
        (output,) = there.outputs(ask(max_tokens=80))
        assert held.waits.is_set()
        assert "it was not back after 0 s: worker s1" in str(output.error)
        assert "has said nothing" in str(output.error)


def test_behind_a_worker_that_was_started_again_the_stuck_one_is_named(pipeline: Open) -> None:
    """Steps are counted by the coordinator, not by each process."""
    fault = replace(stands_still(2, 30), act=worker_lost(1).act)
    with pipeline("llama", [1, 1, 2], fault=fault, rejoin_timeout=2) as there:
        (output,) = there.outputs(ask(max_tokens=80))
        assert len(output.token_ids) > 6, "the other's loss was survived"
        assert f"worker s2 ({there.workers[1].address}) has made no progress" in str(output.error)
        assert there.stats["losses"]["s1"] == 1, "the other was not taken for stuck first"


def test_a_worker_serves_who_comes_while_it_starts(pipeline: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Acceptor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            time.sleep(0.5)

    monkeypatch.setattr(worker, "Acceptor", Slow)
    with pipeline("llama", CUTS, fault=worker_lost()) as there:
        there.answers(ask(max_tokens=80))
        assert there.stats["losses"] == {"s1": 1}
