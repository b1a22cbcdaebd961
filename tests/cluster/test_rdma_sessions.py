"""Sessions that follow each other over rdma, on emulated JACCL, where a device has room for one group and keeps what a
process killed in a receive has held: groups stay where nothing was lost, and are made anew where something was."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import Running, RunningWorker, are_gone, coordinator, until, worker

import splitinfer
from splitinfer.llm import LLM
from transports.emulated_jaccl.device import Limits
from transports.emulated_jaccl.world import VARIABLE, World
from transports.rdma import leftovers

PARAMS = splitinfer.SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=4)
PROMPT = "Once upon a time"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World.make(tmp_path / "world", num_cables=2, limits=Limits(regions=164))  # one more, that a kill may leave
    monkeypatch.setenv(VARIABLE, str(world.folder))
    return world


def layout(world: World, *workers: RunningWorker) -> dict[str, Any]:
    """Stages joined by cables: 0 from the coordinator to the first worker, 1 from that to the second."""
    share = 12 // (len(workers) + 1)
    stages: list[dict[str, Any]] = [{"name": "a", "layers": share}]
    for cable, each in enumerate(workers):
        devices = world.devices(cable)
        stages.append(
            {"name": "bc"[cable], "layers": share, "address": each.address, "transport": "rdma", "device": devices}
        )
    return {"model": "demo", "stages": stages}


def carriers(process: psutil.Process) -> set[int]:
    """The processes below this one that a group lives in."""
    found = set()
    for child in process.children():
        try:
            if "transports.rdma.child" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


def nothing_is_left(world: World) -> None:
    assert {name: world.usage(name).num_left for name in world.ports} == dict.fromkeys(world.ports, 0)
    assert {name: world.overlaps(name) for name in world.ports} == dict.fromkeys(world.ports, 0)
    assert leftovers.read() == ()


@pytest.mark.long
def test_sessions_of_one_process_share_a_group_until_something_is_lost(world: World) -> None:
    with worker(name="b") as there:
        groups, answers = set(), []
        for session in range(5):
            with LLM(layout(world, there)) as llm:
                groups.add((*carriers(psutil.Process()), *carriers(there.process)))
                answers.append(llm.generate(PROMPT, PARAMS)[0].token_ids)
                if session == 2:
                    (own,) = carriers(psutil.Process())
                    assert world.usage("rdma_en0").num_groups == 1
                    request = llm.submit(PROMPT, PARAMS)
                    events = iter(request)
                    next(events)
                    psutil.Process(own).kill()
                    assert request.result().token_ids == answers[0]
                    assert llm.stats()["rejoins"] == 1
        assert all(answer == answers[0] for answer in answers)
        assert len(groups) == 2, "one before the loss, one after it"
        assert all(len(group) == 2 for group in groups), "one process at each end"


def test_a_lost_worker_costs_only_its_own_groups(world: World, tmp_path: Path) -> None:
    with worker(name="b") as b, worker(name="c") as c:
        port = c.address.rpartition(":")[2]
        with LLM(layout(world, b, c)) as llm:
            expected = llm.generate(PROMPT, PARAMS)[0].token_ids
            own, upstream = carriers(psutil.Process()), carriers(b.process)
            assert (len(own), len(upstream), len(carriers(c.process))) == (1, 2, 1)
            request = llm.submit(PROMPT, PARAMS)
            events = iter(request)
            next(events)
            c.end()
            with worker("--port", port, name="c") as again:
                assert request.result().token_ids == expected
                assert llm.stats()["rejoins"] == 1
                assert carriers(psutil.Process()) == own, "nothing was lost between the coordinator and b"
                assert len(carriers(b.process) & upstream) == 1
                assert len(carriers(again.process)) == 1
            assert world.usage("rdma_en0").num_groups == 1
            assert world.usage("rdma_en2").num_groups == 2
        assert [world.usage(name).num_left for name in ("rdma_en0", "rdma_en1", "rdma_en2")] == [0, 0, 0]


@pytest.mark.long
def test_groups_between_workers_outlive_coordinators(world: World, tmp_path: Path) -> None:
    with worker(name="b") as b, worker(name="c") as c:
        path = tmp_path / "layout.yaml"
        path.write_text(yaml.safe_dump(layout(world, b, c)))
        between: set[int] = set()
        for index in range(3):
            with coordinator(path, "--prompt", PROMPT, "--max-tokens", "5") as running:
                if index < 2:
                    assert running.wait(60) == 0
                else:
                    running.sees("stage")
                    _end_suddenly(running)
            between = between or carriers(c.process)
            assert len(between) == 1
            assert carriers(c.process) == between
        until(lambda: world.usage("rdma_en0").num_alive == 0, "the coordinators' own children have ended")
        assert world.usage("rdma_en3").num_groups == 1
        assert world.usage("rdma_en0").num_groups >= 2
        nothing_is_left(world)


def _end_suddenly(running: Running) -> None:
    children = running.children()
    running.process.kill()
    until(lambda: are_gone(children), "its children are gone")


def test_systems_that_do_not_fit_take_tcp_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "world", macos=("26.2", "26.3"))
    monkeypatch.setenv(VARIABLE, str(world.folder))
    notes: list[str] = []
    with worker(name="b") as there:
        cut = layout(world, there)
        cut["stages"][1]["transport"] = "auto"
        with LLM(cut, notice=lambda _, progress: notes.append(progress.text)) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].token_ids
        assert carriers(there.process) == set()
    assert any(note.startswith("tcp in place of rdma: the two Macs have macOS 26.2 and 26.3") for note in notes), notes
