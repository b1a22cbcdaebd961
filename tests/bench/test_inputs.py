"""What a measurement cannot use is said before anything is loaded."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from splitinfer.bench.modes import measure
from splitinfer.bench.shared import inputs
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.texts import passages
from splitinfer.cli import app
from splitinfer.cli.bench import _counts
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM

OPTIONS = Options("demo.yaml", as_json=True, trials=1, prompt_tokens=64, decode_tokens=24)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("something is loaded before all inputs are looked at")

    monkeypatch.setattr(LLM, "_open", load)
    monkeypatch.setattr(ChildProcess, "__init__", load)


def refused(words: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        measure("speed", replace(OPTIONS, **options))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("the tasks need 5,032 tokens, but the model's context is 4,096", {"decode_tokens": 5000}),
        ("no link preset 'pigeon'; known: .*wifi", {"link_preset": "pigeon"}),
    ],
)
def test_what_cannot_be_measured_is_refused(words: str, options: dict[str, Any]):
    refused(words, **options)


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "blank").write_bytes(b" \n\n\t\n")
    refused("text .*blank is empty", text=tmp_path / "blank")
    refused("gone cannot be read: No such file", text=tmp_path / "gone")
    refused("cannot be read: it is not a file", text=tmp_path)
    refused(r"there is no folder .*gone", plot=tmp_path / "gone" / "a.png")
    refused(r"the report cannot be written to .*: there is no folder", report=tmp_path / "gone" / "report.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused("pip install matplotlib", plot=tmp_path / "a.png")


def test_links_need_two_stages(tmp_path: Path):
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump({"model": "demo", "stages": [{"name": "s", "layers": 12}]}))
    refused(r"links between stages; layout .*alone.yaml has 1 stage", layout=str(alone), link_preset="wifi")


@pytest.mark.parametrize("words", [["--layout", "demo.yaml", "--connect-timeout", "nan"], ["--mode", "compare"]])
def test_wrong_options(words: list[str]):
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2
    assert ("--connect-timeout" if "nan" in words else "--mode compare needs a layout") in done.output


def test_streams_are_a_list() -> None:
    assert _counts("8,16,8") == (8, 16)
    assert _counts("0") == ()
    for wrong in ("", "8,", "-1", "many"):
        with pytest.raises(typer.BadParameter, match="--streams takes numbers"):
            _counts(wrong)


def test_a_text_is_read_where_it_has_words(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("\n\nOne paragraph alone.\n\n\n")
    inputs.check_text(path)
    assert passages(path, 3, 100) == ["One paragraph alone."] * 3
