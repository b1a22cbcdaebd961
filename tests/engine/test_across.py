"""A stage across two machines, here two processes: the tokens of one stage, whatever is asked for and goes wrong."""

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv4Interface
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import mlx.core as mx
import pytest
import stages
import tiny
import vlm_configs
from cluster.cable import Cable
from configs import configurations
from engine.door import SEVERAL, Fault, Guesses, Open, Pipeline, ask, num_layers, recut, some_wrong, streams_of
from processes import RunningWorker, local_workers, until, worker
from tiny import Folder

from splitinfer import Flight, SamplingParams
from splitinfer.core.layout import Layout, StageSpec, lay_out
from splitinfer.core.plan import SampledSlice, SampledToken, StageFigures, StepPlan
from splitinfer.engine.fleet import fleet
from splitinfer.engine.fleet.fleet import Fleet, WorkerHandle
from splitinfer.engine.fleet.pipeline import Pipeline as Opened
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.worker import ranks
from splitinfer.engine.worker.ranks import Sampled, join_ranks
from splitinfer.errors import ConfigError, DeviceFailed, PeerError, WorkerLost
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM, Settings
from splitinfer.models.load.halves import Pair
from splitinfer.system.interface_kind import Kind, LocalInterface, is_direct
from splitinfer.wire.messages import Digest, Gather, Half, NextStage, Progress
from transports import LinkOptions, LinkRefused
from transports.rdma import probe
from transports.rdma.joining import _ADDRESS

NIGHTLY = pytest.mark.nightly
VOCAB = 160  # as all tiny models have
DRAFTED = tuple(replace(one, flight=Flight(3)) for one in SEVERAL)
ALONE = {"cuts": [4], "across": [0]}
HYBRID = {"cuts": [1, 2, 1], "across": [1], "scheme": "tcp"}
INSPECTED = ("gemma3_text", "qwen3_next", "gemma4/experts", "qwen4_exp", "glm5_next")

Model = Callable[[str], Path]


@pytest.fixture
def model(tiny_folder: Folder, tmp_path: Path) -> Model:
    """A function that gives the folder of a tiny model, also of a class that is not among ``tiny``'s."""

    def folder(name: str) -> Path:
        if name in tiny.CONFIGS:
            return tiny_folder(name, num_hidden_layers=4)
        is_mlx_lms = name in configurations()
        (where := tmp_path / name.replace("/", "-")).mkdir()
        config = (configurations() if is_mlx_lms else vlm_configs.CONFIGS)[name]
        compare.save(where, as_tiny(config), None if is_mlx_lms else compare.mlx_vlms)
        return where

    return folder


def as_tiny(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the vocabulary and the room of ``tiny``'s; its number of layers is where ``door`` looks."""
    own = config.get("text_config", {})
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "max_position_embeddings": 512}
    own = {name: sizes.get(name, value) for name, value in own.items()}
    layers = own.get("num_hidden_layers", config.get("num_hidden_layers"))
    return config | {n: v for n, v in sizes.items() if n in config} | {"text_config": own, "num_hidden_layers": layers}


def fitting(where: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same stages with all layers of a model; those across two machines have what the others leave."""
    cuts, (at, *_) = list(where["cuts"]), where["across"]
    cuts[at] += num_layers(folder) - sum(cuts)
    return {**where, "cuts": cuts}


def test_a_stage_across_two_processes_gives_the_tokens_of_one(tiny_folder: Folder, pipeline: Open) -> None:
    """Several at once, in chunks, with drafts of which some are wrong."""
    folder = tiny_folder("llama", num_hidden_layers=2)
    streams = streams_of(folder, SEVERAL)
    with pipeline(folder, [2], across=[0], token_budget=16, drafter=lambda: Guesses(streams, some_wrong)) as there:
        greedy = there.answers(*DRAFTED)[0]
        assert greedy == stages.plain_greedy(folder, SEVERAL[0].tokens, len(greedy))
        assert there.stats["speculation"]["accepted"] > 0
        stage = there.stats["stages"][0]
        assert [rank["name"] for rank in stage["ranks"]] == ["s0/0", "s0/1"]
        assert all(rank["weight_bytes"] and 0 < rank["busy_seconds"] < 60 for rank in stage["ranks"])
        assert 0 < stage["sum_seconds"] < 1


def end(there: Pipeline, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill the process of a rank, or stop it."""
    end_process(next(stage.ranks[rank].name for stage in there.llm.layout.stages if stage.across), how)


def end_process(name: str, how: signal.Signals) -> None:
    local_workers()[name].send_signal(how)


@NIGHTLY
@pytest.mark.parametrize("where", [ALONE, HYBRID, {"cuts": [2, 2], "across": [0, 1]}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", *INSPECTED])
def test_every_kind_of_model(name: str, where: dict[str, Any], pipeline: Open, model: Model) -> None:
    with pipeline(folder := model(name), token_budget=16, **fitting(where, folder)) as there:
        there.answers(*SEVERAL, ask(70))


ROADS: dict[str, dict[str, Any]] = {
    "n-grams": {"draft": "ngram"},
    "short of memory": {"block": 8, "kv_bytes": 512 * 70},
    "KV in eight bits": {"kv_format": "k8v8"},
    "int8 on the links": {"codec": "int8", "are_checked": False},
    "a cut of the same ranks": {"fault": recut([1, 2, 1], [2, 1, 1])},
}


@NIGHTLY
@pytest.mark.parametrize(("name", "road"), [
    *(("llama", road) for road in ROADS), *(("gemma3_text", road) for road in ROADS if road != "short of memory"),
])  # fmt: skip
def test_what_a_stage_can_do(name: str, road: str, pipeline: Open, tiny_folder: Folder) -> None:
    folder = tiny_folder(name, head_dim=32, num_hidden_layers=4)
    with pipeline(folder, token_budget=16, **HYBRID, **ROADS[road]) as there:
        there.answers(*SEVERAL)
        assert (there.stats["preemptions"] > 0) == (road == "short of memory")


@NIGHTLY
@pytest.mark.parametrize("name", ["llama", *INSPECTED])
def test_kv_on_disk_is_each_ranks_own(name: str, tmp_path: Path, model: Model, pipeline: Open) -> None:
    """Found by the next process; and where one rank has lost its files, both compute."""
    one, disks, folder = ask(200, max_tokens=8), [Disk(tmp_path / "kv", 10**9)], model(name)
    cached = []
    for _ in range(3):
        with pipeline(folder, disks=disks, block=64, token_budget=64, **fitting(ALONE, folder)) as there:
            cached.append(there.outputs(one)[0].num_cached_tokens)
            if len(cached) == 2:
                groups = sorted({file.parent for file in tmp_path.rglob("*.kv")})
                assert len(groups) == 2
                shutil.rmtree(groups[0])
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] == 199 or (name in INSPECTED and cached[1] >= 64), "where its caches can be continued"


@pytest.mark.parametrize(("where", "rank", "how"), [
    (ALONE, 0, signal.SIGKILL),
    *(pytest.param(*one, marks=NIGHTLY) for one in product([ALONE, HYBRID], [0, 1], [signal.SIGKILL, signal.SIGSTOP])),
], ids=str)  # fmt: skip
def test_either_rank_is_lost(
    rank: int, how: signal.Signals, where: dict[str, Any], tiny_folder: Folder, pipeline: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fault = Fault(act=lambda there: end(there, rank, how), at=10)
    with pipeline(tiny_folder("llama"), fault=fault, rejoin_timeout=60, **where) as there:
        there.answers(ask(30, max_tokens=120), *SEVERAL)
        assert there.stats["rejoins"] == 1
        assert [name for name, count in there.stats["losses"].items() if count] == [f"s{where['across'][0]}"]
    assert f"worker s{where['across'][0]}/{rank} (" in caplog.text, "and not the one that it was lost to"


@NIGHTLY
@pytest.mark.parametrize("where", [ALONE, HYBRID], ids=str)
@pytest.mark.parametrize("name", INSPECTED)
def test_a_class_without_shard_drafts_and_loses_ranks(
    name: str, where: dict[str, Any], model: Model, pipeline: Open
) -> None:
    """Three times, at moments that a seed chooses; glm5_next once, as it takes a minute to load on a busy machine."""
    folder, chance = model(name), random.Random(f"{name} {where}")
    longer = [replace(one, params=replace(one.params, max_tokens=40)) for one in DRAFTED]
    streams = streams_of(folder, longer)
    options: dict[str, Any] = {"drafter": lambda: Guesses(streams, some_wrong), **fitting(where, folder)}
    with pipeline(folder, token_budget=16, rejoin_timeout=60, **options) as there:
        for kill in range(1, 2 if name == "glm5_next" else 4):
            first, *_ = there.submit(*longer)
            there.read(first, chance.randrange(1, 30))
            end(there, chance.randrange(2))
            until(lambda wanted=kill: there.stats["rejoins"] == wanted, "the rank is back", 60)
            there.finish()
        assert there.stats["speculation"]["accepted"] > 0


def test_a_rank_that_is_only_silent_is_not_lost(tiny_folder: Folder, pipeline: Open) -> None:
    """Nor is the one that waits for it in a sum."""

    def stutter(there: Pipeline) -> None:
        end(there, 1, signal.SIGSTOP)
        time.sleep(5)
        end(there, 1, signal.SIGCONT)

    with pipeline(tiny_folder("llama"), fault=Fault(act=stutter, at=10), rejoin_timeout=60, **ALONE) as there:
        there.answers(ask(30, max_tokens=120))
        assert there.stats["rejoins"] == 0


class _Late(Cable):
    """MLX tries again where nobody listens yet, but not where somebody has already said hello."""

    def _connect(self, near: socket.socket) -> None:
        time.sleep(1)
        super()._connect(near)


@dataclass
class CableBetween:
    """Between two ranks of one stage: their sums and their link go over it, the coordinator's links do not."""

    patch: pytest.MonkeyPatch
    cables: list[Cable] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = WorkerHandle.place.fget
        assert place is not None

        def found(worker: WorkerHandle) -> NextStage:
            there: NextStage = place(worker)
            return replace(there, address=f"tcp://127.0.0.1:{self._to(there.address)}") if worker.rank else there

        self.patch.setattr(Fleet, "_gather", lambda group, worker, told: self._gather(group, worker, told))
        self.patch.setattr(WorkerHandle, "place", property(found))

    def _to(self, address: str | int) -> int:
        self.cables.append(cable := _Late(int(str(address).rpartition(":")[2])))
        return cable.port

    def _gather(self, group: Fleet, worker: WorkerHandle, told: Gather) -> None:
        group._gathered[worker] = told.data
        if len(ranks := [one for one in group.workers if one.stage == worker.stage]) == len(group._gathered):
            own = [_ADDRESS.unpack(group._gathered.pop(one)) for one in ranks]
            far = [(host, self._to(port)) for host, port in own]
            for rank, one in enumerate(ranks):
                here = [_ADDRESS.pack(*(own if rank == at else far)[at]) for at in range(2)]
                one.send(Gather(b"".join(here)))

    def close(self) -> None:
        for cable in self.cables:
            cable.close()

    def pull(self) -> None:
        """In the middle of a step: both ranks have got it, and neither gets the other's halves."""
        for_steps, *for_sums = self.cables[:3]
        for cable in for_sums:
            cable.silence()
        time.sleep(1)
        for_steps.silence()


@NIGHTLY
@pytest.mark.parametrize("where", [ALONE, HYBRID], ids=str)
def test_the_cable_between_two_ranks_is_pulled(
    where: dict[str, Any],
    tiny_folder: Folder,
    pipeline: Open,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Both still talk to the coordinator, and wait for each other in a sum."""
    cable, times = CableBetween(monkeypatch), list[float]()
    request.addfinalizer(cable.close)

    def pull(there: Pipeline) -> None:
        times.append(time.monotonic())
        cable.pull()
        until(lambda: not there.llm.health().can_answer, "the loss is noticed", 30)
        times.append(time.monotonic())

    with pipeline(tiny_folder("llama"), fault=Fault(act=pull, at=10), rejoin_timeout=60, **where) as there:
        there.answers(ask(30, max_tokens=120))
        assert there.stats["rejoins"] == 1
    assert times[1] - times[0] < 19  # less than the patience with a step; this cable's ends go on acknowledging


@NIGHTLY
@pytest.mark.parametrize("fault", ["cable", "SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("where", [ALONE, HYBRID], ids=str)
def test_a_loss_while_stages_load(
    where: dict[str, Any],
    fault: str,
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Each rank waits for the other in a sum of the trials behind the reading, and still talks to the coordinator."""
    cable, times, stage = CableBetween(monkeypatch), list[float](), where["across"][0]
    request.addfinalizer(cable.close)

    def notice(name: str, progress: Progress) -> None:
        if name != f"s{stage}/1" or progress.phase != "load" or times:
            return
        times.append(time.monotonic())
        if fault != "cable":
            end_process(name, signal.Signals[fault])
        for one in cable.cables if fault == "cable" else ():
            one.silence()

    layout = stages.layout(tiny_folder("llama"), where["cuts"], ["local"] * 2, across=where["across"])
    with pytest.raises(WorkerLost, match=f"s{stage}/[01] "):
        LLM(layout, notice=notice)
    assert 0 < time.monotonic() - times[0] < 15


def test_rdma_ends_with_its_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["PORT_ACTIVE", "PORT_ACTIVE", "PORT_DOWN"])
    monkeypatch.setattr(probe, "_output", lambda _tool: f"hca_id: rdma_en2\n state: {next(said)} (1)\n")
    monkeypatch.setattr(ranks, "_LOOK_EVERY", 0)
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    ranks._end_with("rdma_en2")
    assert ended == [1]
    assert next(said, None) is None


@contextmanager
def struck(folder: Path, remote: RunningWorker, strike: Callable[[], object], **patience: float) -> Iterator[LLM]:
    """A stage whose second rank is a process of another worker, which is struck in an answer. The tokens stay."""
    prompt, described = stages.prompt(20), stages.layout(folder, [4], [], across=[0])
    described["stages"][0]["across"] = ["local", remote.address]
    with LLM(described, settings=Settings(rejoin_timeout=60.0, **patience)) as llm:
        events = iter(request := llm.submit(prompt, SamplingParams(max_tokens=60, ignore_eos=True)))
        while len(request.output.token_ids) < 10:
            next(events)
        strike()
        assert all(event for event in events)
        assert request.output.token_ids == stages.plain_greedy(folder, prompt, 60)
        yield llm


@NIGHTLY
def test_a_rank_of_another_machine_is_a_process_of_its_worker(tiny_folder: Folder) -> None:
    """It ends with the session, and another takes its place when it is lost."""
    with worker() as remote:

        def strike() -> None:
            (rank,) = remote.children()
            rank.kill()

        with struck(tiny_folder("llama"), remote, strike):
            pass
        until(lambda: not remote.children(), "the rank's process ends with the session", 10)
        assert remote.is_alive


def test_of_two_machines_of_a_stage_one_goes_on(tiny_folder: Folder) -> None:
    folder, patience = tiny_folder("llama"), {"leave_after": 1.0}
    with worker() as remote, struck(folder, remote, lambda: remote.signal(signal.SIGKILL), **patience) as llm:
        assert (llm.layout.cut, llm.layout.workers) == ("4", ())
        assert "s0/1 is gone. s0/0 goes on alone with 4 of 4 layers" in str(llm.health().absent)


@NIGHTLY
def test_recut_to_and_from_two_machines(tiny_folder: Folder, pipeline: Open) -> None:
    folder = tiny_folder("llama")

    def act(there: Pipeline) -> None:
        plain = stages.layout(folder, [4], [])
        for described in (
            stages.layout(folder, [4], [], across=[0]),
            plain,
            stages.layout(folder, [2, 2], [], across=[0, 1]),
        ):
            there.llm.recut(described)

    with pipeline(folder, [4], fault=Fault(act=act)) as there:
        there.answers(*SEVERAL)


def test_a_rank_without_its_key_is_told_where_to_write_it() -> None:
    spec = StageSpec("both", 0, 4, across=("local", "tcp://192.0.2.1:5577")).ranks[1]
    said = fleet._why_refused(spec, "tcp://192.0.2.1:5577", LinkOptions(), LinkRefused("no"))
    assert said.endswith("in a layout under `across:` of stage both as ADDRESS#KEY")


def test_sums_do_not_cross_a_network() -> None:
    spec = StageSpec("both", 0, 4, across=("local", "tcp://192.0.2.1:5577"))
    with pytest.raises(ConfigError, match=r"would cross the network at 192\.0\.2\.1"):
        halves_of(spec, insecure=False)
    with pytest.raises(PeerError, match=r"rank 1 would cross the network at 192\.0\.2\.1"):
        join_ranks(Half(1, "ring", "", "10.0.0.9", "192.0.2.1"), bytes)
    halves_of(replace(spec, across=("tcp://192.0.2.1:5577", "tcp://192.0.2.2:5577")), insecure=False)  # they say it
    rank0, rank1 = halves_of(spec, insecure=True)
    assert rank0.insecure
    assert (rank0.own, rank0.towards, rank1.own, rank1.towards) == ("", "192.0.2.1", "192.0.2.1", "")
    assert halves_of(replace(spec, sums="jaccl"), insecure=False)[1].sums == "jaccl"


@pytest.mark.parametrize(("kind", "own", "is_so"), [
    (Kind.THUNDERBOLT, "169.254.7.1", True), (Kind.THUNDERBOLT, "10.9.0.1", True), (Kind.CABLE, "169.254.7.1", True),
    (Kind.CABLE, "10.9.0.1", False), (Kind.WIRELESS, "169.254.7.1", False), (Kind.VPN, "169.254.7.1", False),
])  # fmt: skip
def test_a_cable_is_told_by_the_interface_and_not_by_the_address(kind: Kind, own: str, is_so: bool) -> None:
    """Which the system takes towards the other rank; machines on Wi-Fi without DHCP have such addresses, too."""
    other = LocalInterface("x", Kind.THUNDERBOLT, (IPv4Interface("169.254.9.9/16"),))
    interfaces = (other, LocalInterface("y", kind, (IPv4Interface(f"{own}/16"),)))
    assert is_direct(own, interfaces) is is_so
    assert is_direct("127.0.0.1", ())
    assert not is_direct("10.1.1.1", interfaces), "of no interface that is known"


def test_what_both_ranks_have_sampled_is_compared() -> None:
    ranks, found = [Sampled() for _ in range(3)], list[list[Digest]]()
    for number, rank in enumerate(ranks):
        tokens = [SampledToken(5 + (number == 2 and step == 20)) for step in range(40)]
        done = (
            Finished(StepPlan(step), partial(StageFigures, 0, 0.0, 0.0), None, None, (SampledSlice(1, (token,)),))
            for step, token in enumerate(tokens)
        )
        found.append([digest for one in done if (digest := rank.after(one)) is not None])
    right, same, other = found
    assert [one.step for one in right] == [0, 16, 32]
    assert right == same
    assert [one == another for one, another in zip(right, other, strict=True)] == [True, True, False]
    layout = Layout(lay_out([("both", 4, None, {"across": ("local", "local")})]))
    opened: Any = Opened(SimpleNamespace(layout=layout, keys=SimpleNamespace(own=None), running=()), print, print)
    handle: Any = WorkerHandle(0, layout.workers[0], "", SimpleNamespace(), rank=0)
    for one in (*right, *same):
        opened._compare(handle, one)
    opened._compare(handle, right[-1])
    with pytest.raises(WorkerLost, match="the two ranks of stage both have sampled different tokens"):
        opened._compare(handle, other[-1])


def test_sums_that_are_wrong_show_when_a_stage_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Pair(0, mx.distributed.init())  # alone, so that nothing is added
    with pytest.raises(DeviceFailed, match="add up to other numbers"):
        group.check()
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 3 * x)
    group.check()
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: x + mx.array([1.0, 0.0, 1.0]))
    assert group.all_of([True, True, False]) == [True, False, False]
