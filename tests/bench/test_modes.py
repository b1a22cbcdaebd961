"""`splitinfer bench --mode`: its names, and the old ones that still work for one release."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from splitinfer.cli import app

COMMAND = importlib.import_module("splitinfer.cli.bench")  # the package has the function by this name
MEASURES = {
    "prefix": "prefix.run.measure_prefix",
    "speculation": "speculation.run.measure_speculation",
    "exact": "exact.measure_exact",
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that were run; nothing is measured."""
    found: list[str] = []
    for name, measure in MEASURES.items():
        monkeypatch.setattr(f"splitinfer.bench.{measure}", lambda _options, name=name: found.append(name) or 0)
    monkeypatch.setattr("splitinfer.bench.shared.blas.prefer_openblas", lambda: None)
    monkeypatch.setattr(COMMAND, "set_up", lambda _verbose: None)
    monkeypatch.setattr(COMMAND, "finish", _finish)
    return found


def _finish(run: Any, _verbose: bool) -> None:
    raise typer.Exit(run())


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--layout", "demo.yaml", *options])


@pytest.mark.parametrize("name", MEASURES)
def test_a_mode_is_run_by_its_name(name: str, measured: list[str]):
    done = bench("--mode", name)
    assert (done.exit_code, measured, done.stderr) == (0, [name], "")


@pytest.mark.parametrize(("old", "name"), [("kept", "prefix"), ("spec", "speculation")])
def test_an_old_name_runs_the_same_mode_and_warns(old: str, name: str, measured: list[str]):
    done = bench("--mode", old)
    assert (done.exit_code, measured, done.stdout) == (0, [name], "")
    assert done.stderr.splitlines() == [
        f"splitinfer: --mode {old} is called --mode {name} now; the next release drops the old name"
    ]


def test_the_warning_comes_once_though_the_program_starts_anew_with_another_blas(tmp_path: Path):
    words = ["bench", "--mode", "kept", "--layout", str(tmp_path / "gone.yaml")]
    done = subprocess.run([sys.executable, "-m", "splitinfer", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("is called --mode prefix now") == 1


def test_help_lists_the_new_names_only():
    option = next(each for each in typer.main.get_command(app).commands["bench"].params if each.name == "mode")
    shown = f"{option.metavar} {option.help}"
    assert option.metavar == "[speed|prefix|speculation|serve|kv|wire|link|device|exact|server]"
    assert not {"kept", "spec"} & set(shown.replace(":", " ").replace("|", " ").split())


def test_an_unknown_mode_is_a_wrong_option(measured: list[str]):
    done = bench("--mode", "pigeon")
    assert (done.exit_code, measured) == (2, [])
    assert "is not one of speed, prefix, speculation" in " ".join(done.stderr.replace("│", " ").split())
