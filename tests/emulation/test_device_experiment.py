"""The program that measures what the loops leave of a device's time runs, and prints its figures."""

import sys
from importlib import util
from pathlib import Path

import pytest

from splitinfer.machine.selection import VARIABLE

PROGRAM = Path(__file__).parents[2] / "scripts" / "experiments" / "device.py"
ROWS = "{layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 20}"
SHORT = {"_WARM": 3, "_COUNTED": 8, "_LONG_CHUNKS": 2, "_AFTER": 4, "_BEFORE": 6}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = util.spec_from_file_location("device_experiment", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, program)
    spec.loader.exec_module(program)
    monkeypatch.setenv(VARIABLE, "")  # what the program sets ends with the test
    for name, value in SHORT.items():
        monkeypatch.setattr(program, name, value)
    (tmp_path / "machine.yaml").write_text(f"stages:\n  - {ROWS}\n  - {ROWS}\nlaunches_ahead: true\n")
    found = program.measure(tmp_path / "machine.yaml", 1, program.CASES, 1)
    assert 0 < found["groups"][0]["share"] < 1.1
    assert found["one_stream"][0]["seconds_a_token"] > 0.024
    assert found["late_steps"]["steps"] > 20
    assert found["measured_on"]["device"] == "emulated accelerator"
