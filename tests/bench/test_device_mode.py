"""`bench --mode device`: short, on a machine that is quick enough for a test."""

import json
from pathlib import Path

import pytest

from splitinfer.bench import device as run
from splitinfer.bench.modes import measure
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.stand_in import stand_in_layout
from splitinfer.core.plan import StageFigures, StepResult
from splitinfer.engine.device.late_steps import LateSteps
from splitinfer.errors import ConfigError
from splitinfer.machine.selection import VARIABLE

MACHINE = """
stages:
  - {layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 20}
  - {layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 4}
launches_ahead: true
"""


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "_WARM": 3, "_COUNTED": 8, "_LONG_CHUNKS": 2, "_AFTER": 4, "_BEFORE": 6, "_ROUNDS": 20,
    }.items():  # fmt: skip
        monkeypatch.setattr(run, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "machine.yaml").write_text(MACHINE)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "machine.yaml"))


@pytest.mark.usefixtures("brief")
def test_the_document_compares_with_what_the_device_allows(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("device", Options(trials=1, connect_timeout=20.0)) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    (one,), (groups,), (after,), (long,) = (
        found[name] for name in ("one_stream", "groups", "after_prompt", "long_prompt")
    )
    assert one["stages"] == pytest.approx(0.024)
    assert 0 < one["hops"] < 0.02
    assert one["over"] == pytest.approx(one["seconds_a_token"] - one["stages"] - one["hops"])
    assert one["seconds_a_token"] >= 0.024, "no token can come sooner than the device allows"
    assert groups["allowed"] == pytest.approx(8 / 0.0125)
    assert 0 < groups["share"] <= 1.05
    assert after["ttft"] >= 3 * 0.06, "two chunks on two stages take three steps' time"
    assert long["objective"] == pytest.approx(3 * long["usual"])
    assert [stage["name"] for stage in groups["window"]] == ["stage0", "stage1"]
    assert found["accelerator"]["machine"] == "machine.yaml"
    assert found["accelerator"]["steps"] > 0
    assert "emulated:" in out


def test_without_a_machine_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="--accelerator FILE"):
        measure("device", Options("demo.yaml"))


def test_the_stand_in_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layout = stand_in_layout(3)
    weights = next((tmp_path / "splitinfer" / "bench" / "stand-in-6-layers").glob("model-*"))
    made = weights.stat().st_mtime_ns
    assert stand_in_layout(3) == layout
    assert weights.stat().st_mtime_ns == made
    assert [stage["layers"] for stage in json.loads(layout.read_text())["stages"]] == [2, 2, 2]


def test_one_late_step_in_a_thousand_is_allowed() -> None:
    counted = LateSteps()
    figures = (StageFigures(0, 0.0, 1.0), StageFigures(1, 0.0, 1.0))
    for step in range(500):
        counted.count(StepResult(step, figures=figures))
    counted.count(StepResult(500, figures=(StageFigures(0, 0.0, 1.0, notes=("late",)), figures[1])))
    assert not counted.are_too_many
    counted.count(StepResult(501, figures=(StageFigures(0, 0.0, 1.0, notes=("late",)), figures[1])))
    assert counted.are_too_many
