"""What a measurement cannot use is said before anything is loaded."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from splitinfer.bench.modes import measure
from splitinfer.bench.shared import inputs
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.texts import passages
from splitinfer.cli import app
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE

LAYOUT = "demo.yaml"
OPTIONS = Options(LAYOUT, as_json=True, trials=1, prompt_tokens=64, decode_tokens=24)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("something is loaded before all inputs are looked at")

    monkeypatch.setattr(LLM, "_open", load)
    monkeypatch.setattr(ChildProcess, "__init__", load)


def refused(mode: str, words: str, **options: Any) -> None:
    """A measurement is refused with these words."""
    with pytest.raises(ConfigError, match=words):
        measure(mode, replace(OPTIONS, **options))


@pytest.mark.parametrize("mode", ["speculation", "kv", "wire"])
def test_a_text_that_cannot_be_read(mode: str, tmp_path: Path):
    for name, content in (("empty", b""), ("blank", b" \n\n\t\n")):
        (tmp_path / name).write_bytes(content)
        refused(mode, f"text .*{name} is empty", text=tmp_path / name)
    refused(mode, "gone cannot be read: No such file", text=tmp_path / "gone")
    refused(mode, "cannot be read: it is not a file", text=tmp_path)


@pytest.mark.parametrize("mode", ["speculation", "serve"])
def test_a_plot_that_cannot_be_written(mode: str, tmp_path: Path):
    (tmp_path / "folder.png").mkdir()
    refused(mode, r"there is no folder .*gone", plot=tmp_path / "gone" / "a.png")
    refused(mode, "it is a folder", plot=tmp_path / "folder.png")


def test_a_plot_in_no_format(tmp_path: Path):
    pytest.importorskip("matplotlib")
    refused("serve", r"a\.xyz .* no format of a plot; there are .*png", plot=tmp_path / "a.xyz")


CONTEXT = "tokens, but the model's context is 4,096"


@pytest.mark.parametrize(
    ("mode", "words", "options"),
    [
        ("speed", f"the tasks need 5,032 {CONTEXT}", {"decode_tokens": 5000}),
        ("speculation", f"the tasks need 5,048 {CONTEXT}", {"decode_tokens": 5000}),
        ("kv", f"the tasks need 4,114 {CONTEXT}", {"prompt_tokens": 4090}),
        ("wire", f"the tasks need 4,097 {CONTEXT}", {"prompt_tokens": 4096}),
        ("prefix", f"the tasks need 4,130 {CONTEXT}", {"prompt_tokens": 4090}),
        ("prefix", "at least 9", {"prompt_tokens": 8}),
        ("speculation", "--draft none", {"draft": "none"}),
        ("serve", "cannot be read", {"lengths": Path("gone.csv"), "model": "nobody/nothing"}),
        ("speed", "no link preset 'pigeon'; known: .*wifi", {"link_preset": "pigeon"}),
    ],
)
def test_what_cannot_be_measured_is_refused(mode: str, words: str, options: dict[str, Any]):
    refused(mode, words, **options)


def test_links_need_two_stages(tmp_path: Path):
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump({"model": "demo", "stages": [{"name": "s", "layers": 12}]}))
    refused("wire", "has 1 stage", layout=str(alone))
    refused("speed", r"links between stages; layout .*alone.yaml has 1 stage", layout=str(alone), link_preset="wifi")


@pytest.mark.parametrize("mode", ["device", "server", "several"])
def test_without_a_layout_there_must_be_a_machine_to_emulate(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    refused(mode, "--layout FILE.*--accelerator FILE", layout="")


@pytest.mark.parametrize("option", ["--rate", "--scale", "--kv-gb", "--connect-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_a_wrong_option(option: str, value: str):
    if (option, value) == ("--kv-gb", "inf"):
        pytest.skip("all memory there is")
    done = CliRunner().invoke(app, ["bench", "--mode", "serve", "--layout", LAYOUT, option, value])
    assert done.exit_code == 2
    assert option in done.output


def test_without_the_library_that_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        inputs.check_plot(tmp_path / "a.png")


def test_a_text_is_read_where_it_has_words(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("\n\nOne paragraph alone.\n\n\n")
    inputs.check_text(path)
    assert passages(path, 3, 100) == ["One paragraph alone."] * 3
