"""What a measurement cannot use is said before anything is loaded."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from splitinfer.bench.kv import KVOptions, measure_kv
from splitinfer.bench.prefix.run import PrefixOptions, measure_prefix
from splitinfer.bench.serving.run import ServingBenchOptions, measure_serve
from splitinfer.bench.shared import inputs
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.texts import passages
from splitinfer.bench.speculation.run import SpeculationOptions, measure_speculation
from splitinfer.bench.wire.run import WireOptions, measure_wire
from splitinfer.cli import app
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM

LAYOUT = "demo.yaml"
SPEC = SpeculationOptions(LAYOUT, None, True, 1, 24, 1, None, True, 10.0)
KV = KVOptions(LAYOUT, None, True, 1, 64, 8, 1, 10.0, None)
WIRE = WireOptions(LAYOUT, None, True, 1, 64, None, 1, 10.0, None, 2)
SERVE = ServingBenchOptions(LAYOUT, None, True, 1, 64, 8, None, 1, True, 10.0, None, 1.0, 4, None, None, None)
KEPT = PrefixOptions(LAYOUT, None, True, 1, 64, None, 1)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("something is loaded before all inputs are looked at")

    monkeypatch.setattr(LLM, "_open", load)
    monkeypatch.setattr(ChildProcess, "__init__", load)


def spec_text(path: Path) -> int:
    return measure_speculation(replace(SPEC, text=path))


def kv_text(path: Path) -> int:
    return measure_kv(replace(KV, text=path))


def wire_text(path: Path) -> int:
    return measure_wire(replace(WIRE, text=path))


@pytest.mark.parametrize("measure", [spec_text, kv_text, wire_text])
def test_a_text_that_cannot_be_read(measure: Callable[[Path], int], tmp_path: Path):
    for name, content in (("empty", b""), ("blank", b" \n\n\t\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"text .*{name} is empty"):
            measure(tmp_path / name)
    with pytest.raises(ConfigError, match="gone cannot be read: No such file"):
        measure(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be read: it is not a file"):
        measure(tmp_path)


def spec_plot(path: Path) -> int:
    return measure_speculation(replace(SPEC, plot=path))


def serve_plot(path: Path) -> int:
    return measure_serve(replace(SERVE, plot=path))


@pytest.mark.parametrize("measure", [spec_plot, serve_plot])
def test_a_plot_that_cannot_be_written(measure: Callable[[Path], int], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no folder .*gone"):
        measure(tmp_path / "gone" / "a.png")
    with pytest.raises(ConfigError, match=r"a\.xyz .* no format of a plot; there are .*png"):
        measure(tmp_path / "a.xyz")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        measure(tmp_path / "folder.png")


@pytest.mark.parametrize(
    ("measure", "needed"),
    [
        (lambda: measure_speculation(replace(SPEC, decode_tokens=5000)), "5,048"),
        (lambda: measure_kv(replace(KV, prompt_tokens=4090)), "4,098"),
        (lambda: measure_wire(replace(WIRE, prompt_tokens=4096)), "4,097"),
        (lambda: measure_prefix(replace(KEPT, prompt_tokens=4090)), "4,130"),
    ],
)
def test_what_is_longer_than_the_models_context(measure: Callable[[], int], needed: str):
    with pytest.raises(ConfigError, match=f"the tasks need {needed} tokens, but the model's context is 4,096"):
        measure()


def test_a_conversation_is_longer_than_its_answer():
    with pytest.raises(ConfigError, match="at least 9"):
        measure_prefix(replace(KEPT, prompt_tokens=8))


def test_drafts_are_measured_with_somebody_who_drafts():
    with pytest.raises(ConfigError, match="--draft none"):
        measure_speculation(replace(SPEC, drafter="none"))


def test_lengths_are_read_first(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        measure_serve(replace(SERVE, lengths=tmp_path / "gone.csv", model="nobody/nothing"))


def test_links_need_two_stages(tmp_path: Path):
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump({"model": "demo", "stages": [{"name": "s", "layers": 12}]}))
    with pytest.raises(ConfigError, match="has 1 stage"):
        measure_wire(replace(WIRE, layout=str(alone)))


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
