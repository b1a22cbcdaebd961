"""Endings that meet, the loop's own and the one of whoever closes it; which workers outlive a loss; and what all stages
have on disk."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from stages import pipeline

from splitinfer.config import Layout
from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.engine.coordinator import pipeline as module
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.coordinator.pipeline_config import PipelineConfig
from splitinfer.engine.coordinator.worker_handle import WorkerHandle
from splitinfer.errors import SplitinferError
from splitinfer.models import mlx_vlm
from splitinfer.models.building import mlx_vlm_of
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.wire.messages import Load, Ready
from transports import LinkClosed


class SlowToStop:
    """A local worker that takes a moment to end, as a frozen one does."""

    def __init__(self) -> None:
        self.num_stops = 0
        self.is_gone = False

    def stop(self) -> None:
        self.num_stops += 1
        time.sleep(0.1)
        self.is_gone = True


def make(names: str) -> Pipeline:
    """A pipeline with local workers of these names, not opened."""
    stages = [{"name": "a", "layers": 1}, *({"name": n, "layers": 1, "address": "local"} for n in names)]
    order = PipelineConfig(Layout.from_dict({"stages": stages}), "demo", Fingerprint("c"), 1, 1, 1.0)
    return Pipeline(order, lambda _event: None, lambda _stage, _progress: None)


def test_two_threads_may_close_at_once() -> None:
    pipeline = make("")
    workers = {name: SlowToStop() for name in "bc"}
    pipeline._locals.update(workers)  # type: ignore[arg-type]
    gone_when_done: list[bool] = []

    def close() -> None:
        pipeline.close("the end")
        gone_when_done.append(all(worker.is_gone for worker in workers.values()))

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(5)
    assert gone_when_done == [True, True], "nobody may leave before the workers have"
    assert [worker.num_stops for worker in workers.values()] == [1, 1]


@dataclass
class FakeWorker:
    """A local worker without a process."""

    name: str
    is_alive: bool = True
    was_killed: bool = False

    def ends_within(self, _seconds: float) -> bool:
        return not self.is_alive

    def kill(self) -> None:
        self.was_killed = True

    def stop(self) -> None:
        assert not self.is_alive, "a worker that lives is not to be ended"


@dataclass
class FakeLink:
    """A link as it is found after a loss."""

    silent_for: float = 0.1
    closed: LinkClosed | None = None
    peer_progress: int = 0

    def close(self, _reason: str) -> None:
        pass


def after(monkeypatch: pytest.MonkeyPatch, links: dict[str, FakeLink]) -> tuple[Pipeline, dict[str, Any]]:
    monkeypatch.setattr(module, "take", lambda name, _disk: FakeWorker(name))
    pipeline = make("".join(links))
    workers = {name: FakeWorker(name) for name in links}
    pipeline._locals.update(workers)  # type: ignore[arg-type]
    for stage, spec in enumerate(pipeline.layout.stages[1:], 1):
        pipeline._worker_group.workers.append(WorkerHandle(stage, spec, f"tcp://{spec.name}", links[spec.name]))  # type: ignore[arg-type]
    return pipeline, workers


@pytest.mark.parametrize(
    ("here", "says"),
    [("", " lacks mlx-vlm, and .* needs version 9.9.9 of it"), ("0.7.9", " has mlx-vlm 0.7.9, and .* 'mlx-vlm==9")],
)
def test_a_worker_without_the_models_classes_is_one_sentence(
    here: str, says: str, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = PipelineConfig.load

    def told(config: PipelineConfig, stage: int) -> Load:
        command = load(config, stage)
        assert command.mlx_vlm == "", "this model's classes are mlx-lm's"
        return replace(command, mlx_vlm="9.9.9" if stage else "")

    monkeypatch.setattr(PipelineConfig, "load", told)
    monkeypatch.setattr(mlx_vlm, "version", lambda: here)
    with pytest.raises(SplitinferError, match=says), pipeline(tiny_folder("llama"), [1, 3]):
        pass


@pytest.mark.parametrize(("config", "wanted"), [({"model_type": "llama"}, ""), ({"model_type": "klear"}, "0.7.9")])
def test_whose_classes_a_model_needs(config: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that lacks what its class needs is said to be wrong where the model is built."""
    monkeypatch.setattr(mlx_vlm, "version", lambda: "0.7.9")
    assert mlx_vlm_of(Checkpoint(Path(), config, {}), sees=False) == wanted
    assert mlx_vlm_of(Checkpoint(Path(), config, {}), sees=True) == "0.7.9"


def test_only_local_workers_that_are_past_asking_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = LinkClosed("the end")
    pipeline, workers = after(
        monkeypatch,
        {
            "b": FakeLink(),  # lives
            "c": FakeLink(closed=gone),  # told of a neighbour's loss, and closed its link
            "d": FakeLink(silent_for=3.0, closed=gone),  # froze
            "e": FakeLink(silent_for=2.7),  # froze, which a neighbour was the first to see
            "f": FakeLink(closed=gone),  # died
            "g": FakeLink(silent_for=9.0, closed=gone),  # lives; its link ended while it was heard, long ago
        },
    )
    workers["f"].is_alive = False
    pipeline._worker_group.workers[5].silence_at_end = 0.1
    pipeline.regroup("a loss")
    now = pipeline._locals
    assert {name for name, worker in workers.items() if now[name] is not worker} == {"d", "e", "f"}
    assert all(workers[name].was_killed for name in "de")
    assert not any(workers[name].was_killed for name in "bcg")
    replaced = dict(now)
    pipeline.regroup("once more")
    assert now == replaced, "the new ones answer for themselves"


def test_a_local_worker_whose_engine_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, workers = after(monkeypatch, {"b": FakeLink(peer_progress=7), "c": FakeLink(peer_progress=6)})
    assert "worker c" in str(pipeline.stuck_worker(10.0))
    assert pipeline.remedy == "restarting it"
    pipeline.regroup("stuck")
    assert pipeline._locals["b"] is workers["b"]
    assert workers["c"].was_killed


@dataclass
class OwnFiles:
    """The coordinator's own stage, which can read the files in ``blocks``."""

    blocks: dict[Key, DiskBlock]

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        return tuple(self.blocks[key] for key in keys if key in self.blocks)


def ready(stage: int, kept: tuple[Key, ...] | None) -> Ready:
    return Ready(stage, 0, 0, 0, 0, 0, None, keeps_blocks=True, kept=kept, hidden=None, device="cpu")


def test_only_blocks_on_the_disks_of_all_stages_are_kept() -> None:
    """Otherwise each of the others would be fetched, missed on one stage, and computed after all."""
    pipeline = make("bc")
    blocks = {key: DiskBlock(b"", (i,)) for i, key in enumerate([b"x", b"y", b"z", b"w"])}
    pipeline._own = OwnFiles(blocks)  # type: ignore[assignment]
    pipeline.ready = (ready(0, (b"x", b"y", b"z")), ready(1, (b"y", b"w", b"z")), ready(2, (b"z", b"x", b"w")))
    assert pipeline.kept() == (blocks[b"z"],)
    pipeline.ready = (*pipeline.ready[:2], ready(2, None))
    assert pipeline.kept() == (), "one stage writes none"
