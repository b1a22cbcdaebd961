"""`splitinfer bench --mode`: each name runs its measurement."""

import importlib
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


def test_an_unknown_mode_is_a_wrong_option(measured: list[str]):
    done = bench("--mode", "pigeon")
    assert (done.exit_code, measured) == (2, [])
    assert "is not one of 'speed', 'prefix', 'speculation'" in " ".join(done.stderr.replace("│", " ").split())
