"""A machine is measured on emulated accelerators, whose costs of each layer have to come out, and on the processor."""

import json
from collections import namedtuple
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import tiny
from tiny import Folder

from splitinfer.core.costs.shape import Shape
from splitinfer.engine.drafts import draft_model
from splitinfer.engine.profiling import drafts, load, measure, stopwatch
from splitinfer.engine.profiling.drafts import measure_draft
from splitinfer.engine.profiling.measure import (
    Question,
    checkpoint_of,
    described,
    measure_machine,
    profile_here,
)
from splitinfer.engine.stage import runner
from splitinfer.errors import ProtocolError
from splitinfer.machine.profile import MachineProfile
from splitinfer.machine.selection import VARIABLE
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.places import caches
from tests.emulation import device

FILE = """
each_layer: {rows_ms: {1: 3, 8: 4, 512: 9}, buffers: 7, decode_per_1k_ms: 2, prompt_per_1k_ms: 0.02}
each_step_ms: 5
launches_ahead: true
draft_ms: 4
draft_more_ms: 0.5
"""


class Clock:
    """In the place of ``time``: only waiting moves it, so that nothing is late, whoever shares this machine."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)  # to yield takes a moment, too


def ignore(_done: int, _total: int) -> None:
    """Discards progress."""


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick.yaml").write_text(FILE)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "quick.yaml"))
    clock = Clock()
    for module in (device, measure, stopwatch, drafts, draft_model, runner):
        monkeypatch.setattr(module, "time", clock)
    step, compiled = stopwatch.Trial.step, set[tuple[stopwatch.Trial, int, int]]()

    def compiling(trial: stopwatch.Trial, sequences: Sequence[int], rows: int) -> float:
        """The first step of each shape takes a second more, as where it compiles kernels; that must not count."""
        kernel = (trial, len(sequences), rows)
        more = 0.0 if kernel in compiled else 1.0
        compiled.add(kernel)
        return step(trial, sequences, rows) + more

    monkeypatch.setattr(stopwatch.Trial, "step", compiling)


@pytest.fixture
def question(tiny_folder: Folder) -> Question:
    return Question("m", open_folder(tiny_folder("gemma3_text")))


@pytest.mark.usefixtures("emulated")
def test_halves_of_layers_are_measured_where_they_can_be(tiny_folder: Folder):
    profile = measure_machine("mini", Question("m", open_folder(tiny_folder("llama"))), seconds=2.5)
    assert set(profile.halves) == set(profile.layers) == {"kind 1"}
    for rows in (1, 8):
        assert profile.halves["kind 1"].rows(rows) == pytest.approx(profile.layers["kind 1"].rows(rows) / 2, rel=0.02)


@pytest.mark.usefixtures("emulated")
def test_the_costs_of_an_emulated_accelerator_come_out(question: Question):
    profile = measure_machine("mini", question, seconds=2.5)
    assert set(profile.layers) == {"kind 1", "kind 2"}
    attention, window = profile.layers["kind 2"], profile.layers["kind 1"]
    for shape, seconds in ((Shape(1), 3e-3), (Shape(8), 4e-3), (Shape(512), 9e-3)):
        assert attention.at(shape) == pytest.approx(seconds, rel=0.02), shape
    assert attention.at(Shape(1, 1000)) - attention.at(Shape(1)) == pytest.approx(2e-3, rel=0.05)
    assert attention.at(Shape(512, 0, 10**6)) - attention.at(Shape(512)) == pytest.approx(20e-3, rel=0.05)
    # Most rows have a whole window behind them, here 256 positions, which cost what they cost at any length.
    assert window.at(Shape(1)) == window.at(Shape(1, 10**6)) == pytest.approx(3e-3 + 256 * 2e-6, rel=0.02)
    assert profile.trials.few == pytest.approx(1, rel=0.02)
    assert profile.trials.longest == 512
    assert profile.step == pytest.approx(5e-3, rel=0.02)
    assert profile.head.at(Shape(8)) == pytest.approx(0, abs=0.1e-3)
    assert profile.launches_ahead
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile


@pytest.mark.usefixtures("emulated")
def test_a_step_that_was_quicker_than_usual_does_not_count(question: Question, monkeypatch: pytest.MonkeyPatch):
    step, numbers = stopwatch.Trial.step, count()
    monkeypatch.setattr(stopwatch.Trial, "step", lambda *given: step(*given) / (2 if next(numbers) % 8 == 7 else 1))
    attention = measure_machine("mini", question, seconds=2.5).layers["kind 2"]
    for shape, seconds in ((Shape(1), 3e-3), (Shape(8), 4e-3)):
        assert attention.at(shape) == pytest.approx(seconds, rel=0.05), shape


@pytest.mark.usefixtures("emulated")
def test_first_positions_that_cost_more_than_others_do(question: Question, monkeypatch: pytest.MonkeyPatch):
    step = stopwatch.Trial.step
    some = 1.5e-3  # of each layer for any row of a chat, however many positions it attends to

    def attending(trial: stopwatch.Trial, sequences: Sequence[int], rows: int) -> float:
        num_layers = trial._runner._model.end - trial._runner._model.start
        more = some * num_layers if rows == 1 and trial._lengths[sequences[0]] >= 64 else 0.0
        return step(trial, sequences, rows) + more

    monkeypatch.setattr(stopwatch.Trial, "step", attending)
    attention = measure_machine("mini", question, seconds=2.5).layers["kind 2"]
    assert attention.at(Shape(1, 320)) == pytest.approx(3e-3 + some + 320 * 2e-6, rel=0.02)


@pytest.mark.usefixtures("emulated")
def test_no_layer_is_free_whatever_attending_seems_to_take(question: Question, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stopwatch.Timed, "attending", lambda _timed, _rows: 1.0)
    layers = measure_machine("mini", question, seconds=0.5).layers
    assert min(costs.at(Shape(1)) for costs in layers.values()) > 0


@pytest.mark.usefixtures("emulated")
def test_the_costs_of_drafts_come_out():
    draft, seconds, more = measure_draft("demo-draft+ngram", "auto", 2048)
    assert seconds == pytest.approx(4e-3, rel=0.02)
    assert more == pytest.approx(0.5e-3, rel=0.02)
    assert draft.name == "demo-draft+ngram"
    assert draft.weights > 10**6
    assert measure_draft("ngram", "auto", 2048)[1:] == (0.0, 0.0)


@pytest.mark.own_device
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_on_the_processor(name: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    # No graph is built ahead there, so building one is a part of each step.
    monkeypatch.setattr(runner.StageRunner, "prepare_next", lambda _runner: pytest.fail("a graph was built ahead"))
    question = Question(name, open_folder(tiny_folder(name)))
    profile = measure_machine("here", question, seconds=0.5)
    assert set(profile.layers) == {kind for kind in profile.layers if profile.layers[kind].at(Shape(1)) > 0}
    for costs in profile.layers.values():
        assert costs.at(Shape(32)) >= costs.at(Shape(1))
    assert not profile.launches_ahead
    assert 0 < profile.host < 1
    assert profile.free_bytes > 2**28


def test_whoever_is_told_of_the_steps_may_end_them(question: Question):
    class Ended(Exception):
        pass

    def end(done: int, total: int) -> None:
        assert 0 <= done <= total
        if done == 3:
            raise Ended

    with pytest.raises(Ended):
        measure_machine("here", question, end, seconds=1)


def test_a_model_is_described_without_its_weights(tmp_path: Path):
    folder = tiny.save(tmp_path / "m", "llama", bits=4)
    here = open_folder(folder)
    with checkpoint_of(described(here)) as there:
        assert there.folder != folder
        assert there.config == here.config
        shapes = [{name: (t.dtype, t.shape, t.nbytes) for name, t in one.tensors.items()} for one in (here, there)]
        assert shapes[0] == shapes[1]
        assert Question("m", here).shape() == Question("other name", there).shape()
        left = there.folder
    assert not left.exists()
    assert Question("m", here).shape() != Question("m", here, "float16").shape()
    assert Question("m", here).shape() != Question("m", here, kv_format="k8v8").shape()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"files": {}, "tensors": {"a": 3}}', '{"files": [], "tensors": {}}',
        '{"files": {}, "tensors": {"a": {"dtype": "F32", "shape": [-1, 3]}}}',
        '{"files": {}, "tensors": {"a": {"dtype": "F32", "shape": ["x"]}}}', "[" * 10**5,
    ],
)  # fmt: skip
def test_a_description_that_is_none(text: str):
    with pytest.raises(ProtocolError), checkpoint_of(text.encode()):
        pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names under which this machine was measured."""
    names: list[str] = []

    def count(name: str, question: Question, report: object) -> MachineProfile:
        names.append(name)
        return MachineProfile.from_dict({"name": name, **MEASURED})

    monkeypatch.setattr(measure, "measure_machine", count)
    return names


COSTS = {"points": [[1, 0.001], [8, 0.002]]}
MEASURED = {"layers": {"attention": COSTS}, "head": COSTS, "free_bytes": 5}


def test_a_machine_is_measured_once(question: Question, counted: list[str]):
    """Another model or another device is measured anew, and whatever is damaged is not there."""
    first, again = (profile_here(name, question, ignore) for name in ("mini", "studio"))
    assert (counted, again.name) == (["mini"], "studio")
    assert again.layers["attention"] == first.layers["attention"] == again.head
    profile_here("again", question, ignore, again=True)
    profile_here("half", Question("m", question.checkpoint, "float16"), ignore)
    assert counted == ["mini", "again", "half"]
    for file in (caches() / "profiles").iterdir():
        file.write_text('{"name": 3, "layers": {}}')
    for _ in range(2):
        profile_here("damaged", question, ignore)
    assert counted[3:] == ["damaged"]


def test_a_folder_that_cannot_be_written_changes_nothing(question: Question, counted: list[str]):
    caches().mkdir(parents=True)
    (caches() / "profiles").write_text("a file in its place")
    for _ in range(2):
        profile_here("a", question, ignore)
    assert len(counted) == 2


def test_what_guests_compute_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch):
    """Linux counts it in user and nice, too."""
    times = namedtuple("times", "user nice system idle iowait guest guest_nice")
    monkeypatch.setattr(load.psutil, "cpu_times", lambda: times(10, 5, 2, 100, 7, 3, 4))
    assert load._busy_seconds() == 17
