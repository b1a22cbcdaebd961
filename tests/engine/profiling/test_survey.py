"""Workers are asked for their profiles before anything is loaded, and all links are measured."""

from dataclasses import replace
from functools import partial

import pytest
import stages
from processes import until, worker
from tiny import Folder

from splitinfer.core.layout import StageSpec
from splitinfer.core.link_transport import JACCL, RING
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.engine.profiling import measure, survey
from splitinfer.engine.profiling.measure import Question
from splitinfer.engine.profiling.stopwatch import OnStep
from splitinfer.engine.profiling.survey import Surveyor
from splitinfer.keyring import Keyring
from splitinfer.machine.profile import LinkProfile, MachineProfile, Profiles
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.layer_kinds import describe
from splitinfer.wire.messages import Half

COSTS = {"points": [[1, 0.001], [8, 0.002]]}
QUICK = MachineProfile.from_dict({"name": "x", "layers": {"kind 1": COSTS}, "head": COSTS, "free_bytes": 9})


@pytest.fixture
def question(tiny_folder: Folder) -> Question:
    return Question("m", open_folder(tiny_folder("llama")))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names under which machines were measured, in no time."""
    names: list[str] = []

    def quick(name: str, question: Question, report: OnStep) -> MachineProfile:
        names.append(name)
        report(1, 2)
        return replace(QUICK, name=name)

    monkeypatch.setattr(measure, "measure_machine", quick)
    return names


def run(
    question: Question, addresses: list[str], notice: survey.Notice = lambda _name, _progress: None, row: int = 0
) -> tuple[list[MachineProfile], list[LinkProfile]]:
    workers = [StageSpec(f"w{i}", i, i + 1, address) for i, address in enumerate(addresses, 1)]
    return Surveyor(question, "studio", workers, Keyring().own, 10, notice, take_local=pytest.fail, row=row).run()


def test_all_machines_and_links(question: Question, quickly: list[str]):
    heard: list[tuple[str, str]] = []
    with stages.worker("inproc") as first, stages.worker("tcp") as second:
        machines, links = run(question, [first, second], lambda name, progress: heard.append((name, progress.phase)))
        assert [machine.name for machine in machines] == ["studio", "w1", "w2"]
        assert [machine.address for machine in machines] == [None, first, second]
        assert machines[1].layers == QUICK.layers
        pairs = {(link.source, link.target) for link in links}
        assert pairs == {(a, b) for a in ("studio", "w1", "w2") for b in ("studio", "w1", "w2") if a != b}
        assert len(quickly) == 1, "workers in this process remember what it was measured to do"
        assert {("studio", "measure"), ("studio to w1", "link"), ("w1 to w2", "link")} <= set(heard)
        run(question, [first, second])
        assert len(quickly) == 1
    model = describe(question.checkpoint, None, "m").profile
    Profiles(model, tuple(machines), tuple(links))


def test_sums_over_rdma_are_timed_by_processes_of_their_own(
    question: Question, quickly: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Here over MLX's ring. Where they cannot be timed, the links are as they were."""
    monkeypatch.setattr(survey, "device_for", lambda _over: "rdma_en2")
    with worker() as remote:
        found = list[list[LinkProfile]]()
        for over in (RING, JACCL):
            monkeypatch.setattr(survey, "halves_of", partial(_over, over))
            found.append(run(question, [remote.address], row=4096)[1])
        until(lambda: not remote.children(), "the rank's process ends", 10)
        assert remote.is_alive
    timed, lacking = found
    assert [link.sums_over for link in timed] == [JACCL, JACCL]
    assert all(link.sums is not None and 0 < link.sums.rows(1) <= link.sums.rows(256) < 10 for link in timed)
    assert [link.sums for link in lacking] == [None, None]


def _over(sums: str, spec: StageSpec, *, insecure: bool) -> tuple[Half, ...]:
    return halves_of(replace(spec, sums=sums), insecure=insecure)


def test_workers_of_this_machine_share_its_memory(
    question: Question, quickly: list[str], monkeypatch: pytest.MonkeyPatch
):
    for module in (survey, measure):
        monkeypatch.setattr(module, "unloaded_bytes", lambda: 24)
    with stages.worker("inproc") as first, stages.worker("inproc") as second:
        assert [machine.free_bytes for machine in run(question, [first, second])[0]] == [8, 8, 8]
