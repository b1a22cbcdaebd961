"""`splitinfer bench --mode`: each name runs its measurement."""

import importlib
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from splitinfer.bench.modes import MODULES
from splitinfer.cli import app

COMMAND = importlib.import_module("splitinfer.cli.bench")  # the package has the function by this name


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that were run; nothing is measured."""
    found: list[str] = []
    monkeypatch.setattr("splitinfer.bench.modes.measure", lambda name, _options: found.append(name) or 0)
    monkeypatch.setattr("splitinfer.bench.shared.blas.prefer_openblas", lambda: None)
    monkeypatch.setattr(COMMAND, "set_up", lambda _verbose: None)
    monkeypatch.setattr(COMMAND, "finish", _finish)
    return found


def _finish(run: Any, _verbose: bool) -> None:
    raise typer.Exit(run())


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--layout", "demo.yaml", *options])


@pytest.mark.parametrize("mode", list(COMMAND.Mode))
def test_a_mode_is_run_by_its_name(mode: str, measured: list[str]):
    done = bench("--mode", mode)
    assert (done.exit_code, measured, done.stderr) == (0, [mode], "")
    assert callable(importlib.import_module(f"splitinfer.bench.{MODULES[mode]}").measure)


@pytest.mark.parametrize(("streams", "name"), [("2,4", "several"), ("0", "speculation")])
def test_drafts_are_measured_for_several_streams_where_there_are_any(streams: str, name: str, measured: list[str]):
    done = bench("--mode", "speculation", "--streams", streams)
    assert (done.exit_code, measured) == (0, [name])


@pytest.mark.parametrize("mode", ["speed", "kv"])
def test_most_modes_need_a_layout(mode: str, measured: list[str]):
    done = CliRunner().invoke(app, ["bench", "--mode", mode])
    assert (done.exit_code, measured) == (2, [])
    assert f"--mode {mode} needs a layout" in done.stderr


def test_an_unknown_mode_is_a_wrong_option(measured: list[str]):
    done = bench("--mode", "pigeon")
    assert (done.exit_code, measured) == (2, [])
    assert "is not one of 'speed', 'prefix', 'speculation'" in " ".join(done.stderr.replace("│", " ").split())
