"""What a GPU could show: the document, and each of the parts, tiny, on the CPU backend."""

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import splitinfer.probes
from splitinfer.bench.shared.random_model import Shape
from splitinfer.engine.device import selection
from splitinfer.errors import ConfigError, ModelError
from splitinfer.machine.selection import VARIABLE as ACCELERATOR
from splitinfer.probes import commands, steps
from splitinfer.probes.child import Report, Result, serve
from splitinfer.probes.finding import Finding, Outcome, Reason, passed
from splitinfer.probes.on_gpu import PARTS, gpu_probes, measure_on_gpu
from splitinfer.probes.registry import WORKER_NOWHERE, Probe, selftest_probes
from splitinfer.system.gpu_roads import Road

NAMES = [module.name for module in pkgutil.iter_modules(splitinfer.probes.__path__, "splitinfer.probes.")]


@pytest.mark.parametrize("size", ["full", "small", "tiny"])
def test_every_probe_is_one_that_can_be(size: str):
    probes = gpu_probes(size)
    assert [name for name in PARTS if not any(probe.title == name for probe in probes)] == []
    assert len({probe.name for probe in probes}) == len(probes)
    for probe in (*probes, *selftest_probes(WORKER_NOWHERE)):
        module, _, function = probe.function.partition(":")
        assert callable(getattr(importlib.import_module(f"splitinfer.probes.{module}"), function))
        assert json.dumps(dict(probe.options))
        if shape := probe.options.get("shape"):
            assert max(probe.options.get("layers", [0])) <= Shape(**shape).layers


def test_launching_ahead_is_switched_off_for_one_of_two():
    found = {probe.name: probe.environment for probe in gpu_probes("tiny", ["launch"])}
    assert found["launch, two groups on two stages, launching ahead"] == {}
    assert found["launch, two groups on two stages, not launching ahead"] == {Road.LAUNCH_AHEAD: "0"}


# -- the probes, in this process ---------------------------------------------------------------------------------------


def in_process(function: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The numbers that a probe finds, here."""
    lines: list[dict[str, Any]] = []
    assert serve(json.dumps({"function": function, "options": options, "skip": []}), lines.append) == 0
    found = [line["found"] for line in lines if "found" in line]
    assert [one["sentence"] for one in found if one["outcome"] == "failed"] == []
    return {one["name"]: one["numbers"] for one in found}


def first(part: str, **options: Any) -> dict[str, Mapping[str, Any]]:
    """What a part's first probe finds, tiny."""
    probe = gpu_probes("tiny", [part])[0]
    return in_process(probe.function, {**probe.options, **options})


def test_support_on_the_cpu_is_equal_to_the_last_bit():
    found = first("support")
    assert found["llama, float32"] == {
        "is_number": True, "to_mlx_lm": 0.0, "to_mlx_lm_without_cache": pytest.approx(0.0, abs=1e-5), "way": "rows",
        "kept_kv": True, "split_to_whole": 0.0, "equal": True,
    }  # fmt: skip
    assert (found["summary, float32"]["configurations"], found["summary, float32"]["equal"]) == (2, 2)


def test_launch_on_the_cpu_takes_most_of_a_step():
    found = first("launch")
    assert list(found) == [f"{kind}, {n} layers" for kind in ("bfloat16", "4-bit") for n in (1, 2)]
    for one in found.values():
        assert 0 < one["share"]["p50"] <= 1
        assert one["launch_ms"]["count"] == 3


def test_a_launch_on_an_emulated_device_returns_when_few_command_buffers_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    machine = tmp_path / "machine.yaml"
    machine.write_text(
        "each_layer: {rows_ms: {1: 40}, buffers: 10}\nstages: [{layers: 1}]\nlaunches_ahead: true\nmax_buffers: 10\n"
    )
    monkeypatch.setenv(ACCELERATOR, str(machine))
    one = first("launch", bits=[0], layers=[2])["bfloat16, 2 layers"]
    if not one["late_steps"]:  # another process had the processor
        assert one["step_ms"] > 79
        assert one["share"]["p50"] == pytest.approx(0.5, abs=0.2)  # 10 of 20 buffers are left


def test_rows_on_the_cpu_have_no_errors():
    found = first("rows")
    for name in ("hidden states of the first half", "logits"):
        assert found[f"{name}: trials"]["way"] == "rows"
        assert found[f"{name}: trials"]["kept_kv"] is True
        assert found[f"{name}: 3 rows together"]["count"] == 6
        assert found[f"{name}: 3 rows together"]["max"] < 0.05


def test_errors_of_rows_are_those_of_a_device_that_rounds_otherwise_for_many(monkeypatch: pytest.MonkeyPatch):
    original = steps.StepModel.run

    def rounded(self: Any, parts: Sequence[Any], tokens: Any, hidden: Any) -> list[mx.array]:
        outputs = original(self, parts, tokens, hidden)
        return [1.01 * rows for rows in outputs] if len(parts) > 1 else outputs

    monkeypatch.setattr(steps.StepModel, "run", rounded)
    shape = {**gpu_probes("tiny", ["rows"])[0].options["shape"], "dtype": "float32"}
    found = first("rows", shape=shape)
    assert found["logits: 3 rows together"]["p50"] == pytest.approx(0.01, rel=1e-3)
    assert found["logits: 3 rows together"]["other_token"] == 0
    assert found["logits: prompt in other chunks"]["max"] < 1e-4


def test_send_has_every_kind_of_result():
    found = first("send")
    assert set(found) == {
        "hidden states", "drafts, every other slice void", "prompts as int8",
        "prompts as int8, one of which does not fit", "tokens", "log-probabilities",
    }  # fmt: skip
    for name, one in found.items():
        assert one["until_sent_ms"]["count"] == 3
        assert 0 <= one["until_sent_ms"]["p50"] < 1000
        assert bool(one["unfit_rows"]) is ("does not fit" in name)


def test_an_error_is_relative_to_a_row_and_infinite_where_it_is_no_number():
    wanted = mx.array([[3.0, 4.0], [3.0, -mx.inf], [3.0, 4.0], [3.0, 4.0]])
    rows = mx.array([[3.0, 4.5], [3.0, -mx.inf], [3.0, mx.nan], [3.0, mx.inf]])
    assert steps.row_errors(rows, wanted) == [pytest.approx(0.1), 0.0, float("inf"), float("inf")]


def test_another_mode_is_called_on_the_halves_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    called: list[list[str]] = []

    def start(words: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        called.append(words)
        return subprocess.CompletedProcess(
            words, int(len(called) > 1), 'a table\n{"formats": {}}\n', "loading\nno memory"
        )

    monkeypatch.setattr(commands, "subprocess", SimpleNamespace(run=start, DEVNULL=None))
    assert first("kv", folder=str(tmp_path)) == {"kv": {"formats": {}}}
    assert called[0][2:6] == ["splitinfer", "bench", "--mode", "kv"]
    layout = json.loads(Path(called[0][called[0].index("--layout") + 1]).read_text())
    assert [stage["layers"] for stage in layout["stages"]] == [1, 1]
    assert (Path(layout["model"]) / "config.json").exists()
    with pytest.raises(ModelError, match="splitinfer bench --mode kv: no memory"):
        commands.measure({"mode": "kv", "words": [], "folder": str(tmp_path)}, Report(lambda _line: None))


# -- the document ------------------------------------------------------------------------------------------------------


class Planted:
    """Runs no process: those of ``rows`` fail. ``environments``: of each."""

    def __init__(self, gpu: bool = False) -> None:
        self.device, self.environments = {"gpu": gpu, "device": "a card" if gpu else "cpu"}, list[dict[str, str]]()

    def __call__(self, probe: Probe, limit: float, *_: Any, environment: dict[str, str], **_more: Any) -> Result:
        self.environments.append(environment)
        found = passed("device", "", self.device) if probe.name == "about" else passed("a", "", {"ms": 1.0})
        ending = Finding("", Outcome.FAILED, "failed: on purpose", reason=Reason.FAILED)
        return Result((found,), ending if probe.title == "rows" else None, 0.1, limit, 1)


def test_the_document_has_every_part_and_what_went_wrong(tmp_path: Path):
    out = tmp_path / "document.json"
    found = measure_on_gpu(size="tiny", out=out, run=Planted())
    assert list(found["parts"]) == [probe.name for probe in gpu_probes("tiny")]
    assert found["parts"]["send, a random model"]["found"] == {"a": {"ms": 1.0}}
    assert found["parts"]["rows, dense, bfloat16"]["problem"] == "failed: on purpose"
    assert found["problems"][0] == "rows, dense, bfloat16: failed: on purpose"
    assert len(found["problems"]) == 4
    assert json.loads(out.read_text()) == found
    assert list(tmp_path.iterdir()) == [out]


def test_what_computes_decides_the_size_and_the_environment():
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for options, gpu, size, environment in (
        ({}, True, "full", {}), ({"on": "cpu"}, False, "small", hidden),
        ({"accelerator": "two-large"}, False, "small", {**hidden, ACCELERATOR: "two-large"}),
    ):  # fmt: skip
        run = Planted(gpu)
        found = measure_on_gpu(["send"], run=run, **options)  # type: ignore[arg-type]
        assert (found["size"], run.environments) == (size, [environment] * 2)


@pytest.mark.parametrize(("on", "gpu", "words"), [("gpu", False, "finds no GPU"), ("cpu", True, "cannot be kept")])
def test_what_should_compute_has_to_be_there(on: str, gpu: bool, words: str):
    with pytest.raises(ConfigError, match=words):
        measure_on_gpu(["send"], on=on, run=Planted(gpu))


def test_the_command_line_writes_one_document():
    command = [sys.executable, "-m", "splitinfer.probes.on_gpu", "--size", "tiny", "--on", "cpu", "--parts"]
    done = subprocess.run([*command, "send"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["on"]["device"], found["problems"]) == ("cpu", [])
    assert found["parts"]["send, a random model"]["found"]["tokens"]["until_sent_ms"]["count"] == 3
    done = subprocess.run([*command, "send,pigeon"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "--parts takes support, launch" in done.stderr) == (1, True)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_true(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# -- launching ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "computes_at_launch"), [(None, False), ("", False), ("1", False), ("0", True)])
def test_the_waiter_can_be_switched_off(value: str | None, computes_at_launch: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(Road.WAITER, raising=False)
    if value is not None:
        monkeypatch.setenv(Road.WAITER, value)
    monkeypatch.setattr(selection, "_share_the_interpreter", lambda: None)
    monkeypatch.setattr(selection, "on_gpu", lambda: True)
    assert selection.default_device.__wrapped__().computes_at_launch is computes_at_launch
    monkeypatch.setenv(ACCELERATOR, "each-layer")
    assert selection.open_device(0, (0, 2)).computes_at_launch is computes_at_launch


def test_a_cpu_computes_at_launch_whatever_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(Road.WAITER, "1")
    assert selection.default_device.__wrapped__().computes_at_launch
