"""The command: tables, a layout on disk that is never lost, and mistakes in one sentence."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.config import read_layout
from splitinfer.core.layout import StageSpec
from splitinfer.errors import CannotFit, ConfigError, Refused, SplitinferError
from splitinfer.llm import automatic
from splitinfer.machine.profile import Profiles
from tests.placement.rigs import GB, rig

_QUICK = ["--streams", "2", "--prompt-tokens", "64", "--answer-tokens", "32"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command on profiles; returns its exit code, standard output's lines and its error."""
    monkeypatch.chdir(tmp_path)

    def run(
        profiles: Profiles | None, *given: str, busy: bool = False
    ) -> tuple[int, list[str], SplitinferError | None]:
        if profiles is not None:
            model = replace(profiles.model, draft=None)

            def measured(_model: str, workers: Sequence[StageSpec], *_: object, **__: object) -> Profiles:
                if busy and workers:
                    raise Refused("worker m1 serves another coordinator")
                return replace(profiles, model=model)

            monkeypatch.setattr(automatic, "measured_profiles", measured)
            given = (
                given if {"--layout", "--model"} & {*given} else ("--model", "some/model", "--workers", "m1", *given)
            )
        done = CliRunner().invoke(app, ["plan", *given, *_QUICK])
        error = done.exception if isinstance(done.exception, SplitinferError) else None
        return done.exit_code, done.stdout.strip().splitlines(), error

    return run


def test_three_cuts_and_a_layout(plan):
    code, lines, error = plan(rig((1, 3)), "--for", "throughput", "--out", "my.yaml")
    assert (code, error) == (0, None)
    assert not any(line.startswith("{") for line in lines), "JSON is only for --json"
    document = json.loads(plan(rig((1, 3)), "--json")[1][-1])
    assert set(document["best"]) == {"chat", "throughput", "context"}
    assert "m0 alone" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:7]] == [
        "fits", "one chat", "chat: 64 + 32 tokens", "2 at once", "a prompt of 4,096 tokens"
    ]  # fmt: skip
    assert "Best for throughput: m0 " in lines[-1]
    layout = read_layout(Path("my.yaml"))
    assert [(each.name, each.num_layers) for each in layout.stages] == [
        (each["name"], each["layers"]) for each in document["best"]["throughput"]["stages"]
    ]
    assert layout.model == "some/model"


def test_a_model_is_enough_and_a_paired_worker_that_is_busy_is_left_out(plan, monkeypatch: pytest.MonkeyPatch):
    code, lines, error = plan(rig((1,)), "--model", "some/model")
    assert (code, error) == (0, None)
    assert "m0 alone" in lines[0]
    assert "with a second one like it" in lines[0]
    found = [{"name": "m1", "address": "tcp://m1:5577", "key": "ab" * 32}]
    monkeypatch.setattr(sys.modules["splitinfer.cli.plan"], "paired_workers", lambda: found)
    code, lines, _ = plan(rig((1,)), "--model", "some/model", busy=True)
    assert code == 0
    assert "with a second one like it" in lines[0]


def test_a_file_that_is_there_is_kept(plan):
    Path("my.yaml").write_text("mine")
    _, _, error = plan(rig((1, 1)), "--out", "my.yaml")
    assert "my.yaml exists; name another file, or replace it with --force" in str(error)
    assert Path("my.yaml").read_text() == "mine"
    assert plan(rig((1,)), "--out", "my.yaml", "--force")[0] == 0
    assert read_layout(Path("my.yaml")).num_layers == 12


def test_what_does_not_fit_is_an_error_with_what_would(plan):
    code, lines, error = plan(rig((1, 1), free=(3 * GB, 2 * GB)), "--json", "--out", "my.yaml")
    assert code == 1
    assert isinstance(error, CannotFit)
    assert "GB more memory" in str(error)
    assert "one more machine" in str(error)
    assert set(json.loads(lines[0])["shortages"]) == {"chat", "throughput", "context"}
    assert len(lines) == 1
    assert not Path("my.yaml").exists()


def test_what_a_plan_does_not_choose_is_as_the_layout_has_it(plan):
    Path("base.yaml").write_text(
        "{model: m, dtype: float16, kv_format: k8v8, float32_head: true,"
        " serving: {policy: prefill_first, max_running: 3}, stages: [{name: m0, layers: 1},"
        " {name: m1, layers: 1, address: 'tcp://x:1', codec: int8, transport: auto}]}"
    )
    given = ("--layout", "base.yaml", "--use-all", "--json", "--out", "my.yaml")
    code, lines, _ = plan(rig((1, 2)), *given)
    assert code == 0
    assert json.loads(lines[-1])["machines"] == ["m0", "m1"]
    base, found = (read_layout(Path(name)) for name in ("base.yaml", "my.yaml"))
    assert found.serving == base.serving
    assert (found.dtype, found.kv_format, found.float32_head) == ("float16", "k8v8", True)
    last = found.stages[-1]
    assert (last.codec, last.link_transport) == ("int8", base.stages[1].link_transport)
    assert last.address == "tcp://m1.local:5577"


def test_mistakes_are_one_sentence(plan):
    _, _, error = plan(rig((1, 1)), "--out", "/dev/null/x.yaml")
    assert isinstance(error, ConfigError)
    assert "/dev/null/x.yaml cannot be written" in str(error)
    _, _, error = plan(None)
    assert "a model is needed" in str(error)
    assert plan(rig((1,)), "--kv-share", "2")[0] == 2
