"""`splitinfer up`, `down`, `status` and `on-host`, between the command line and machines that are made up."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_launch_steps import OWN, SEEN, STARTED, WORKER
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.versions import own_versions
from splitinfer.launch.answers import Do, Refusal, Request, Stopped, encode, understand
from splitinfer.launch.hosts import Host
from splitinfer.launch.place import state_folder
from splitinfer.launch.ssh import Ended
from splitinfer.llm.automatic import Chosen


class MadeUpMachines:
    """In the place of ssh: answers by what is asked. ``broken``: hosts that refuse. ``planned``: what was to be cut,
    and for whom."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.planned: list[tuple[str, list[dict[str, str]]]] = []

    def __enter__(self) -> "MadeUpMachines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, host: Host, script: str) -> Ended:
        mark = script.split("mark=")[1].split("\n")[0]
        asked = json.loads(script.split("request='")[1].split("'\n")[0])["do"]
        answers = {Do.LOOK: SEEN, Do.START: STARTED, Do.STOP: Stopped((WORKER,), ())}
        answer = Refusal("the port is in use by another program") if host.name in self.broken else answers[asked]
        return Ended(0, f"{mark} {encode(answer)}\n")

    def hostname(self, host: Host) -> str:
        return f"{host.name}.local"

    def plan(self, model: str, workers: list[dict[str, str]], *_: object) -> Chosen:
        self.planned.append((model, workers))
        return Chosen(Layout((StageSpec("studio", 0, 4), StageSpec("mini", 4, 12, "tcp://mini.local:5577"))), "Two.")


def nearest(workers: Sequence[tuple[str, str, str]], **_: Any) -> dict[str, str]:
    return {name: address for name, _, address in workers}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpMachines:
    made = MadeUpMachines()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("splitinfer.launch.ssh.Ssh", lambda: made)
    monkeypatch.setattr("splitinfer.launch.own.own", lambda: OWN)
    monkeypatch.setattr("splitinfer.discovery.discover.best_addresses", nearest)
    monkeypatch.setattr("splitinfer.cli.automatic.planned", made.plan)
    return made


def said(*words: str, code: int = 0) -> str:
    """What a command says."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_up_plans_for_the_workers_and_remembers_the_hosts(machines: MadeUpMachines):
    layout = state_folder() / "layout.yaml"
    assert f"the layout is in {layout}" in said("up", "eve@mini.local", "air:7000", "--model", "demo", "--prepare")
    assert "mini.local:5577" in layout.read_text()
    said("up", "--prepare")
    said("up", "--model", "other", "--prepare")
    workers = [
        {"name": "mini", "address": "tcp://mini.local:5577", "key": STARTED.key},
        {"name": "air", "address": "tcp://air.local:7000", "key": STARTED.key},
    ]
    assert machines.planned == [(model, workers) for model in ("demo", "demo", "other")]


def test_one_that_fails_is_named_and_all_are_remembered(machines: MadeUpMachines):
    machines.broken = {"air"}
    failed = said("up", "mini", "air", "--model", "demo", code=1)
    assert "worker started, port 5577" in failed
    assert "in use by another program" in failed
    assert "splitinfer: air did not start; the other hosts are unchanged" in failed
    assert (machines.planned, (state_folder() / "layout.yaml").exists()) == ([], False)
    machines.broken.clear()
    said("up", "--prepare")
    assert [worker["name"] for worker in machines.planned[0][1]] == ["mini", "air"]


def test_down_and_status_end_with_what_they_found(machines: MadeUpMachines):
    assert "mini: the worker at port 5577 is stopped" in said("down", "mini", "air")
    assert "40.0 of 64.0 GB" in said("status", "mini", "air")
    machines.broken = {"air"}
    for command in ("down", "status"):
        said(command, "mini", "air", code=1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-x=y"], "No such option"),
        (["a b", "--model", "demo"], "is not a host"),
        ([], "no host is known yet"),
        (["mini"], "no model is known yet"),
        (["mini", "--serve", "1", "--prepare"], "give one of them"),
        (["mini", "--hostfile", "/nowhere", "--model", "demo"], "give one of them"),
        (["--hostfile", "/nowhere", "--model", "demo"], "there is no hostfile"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], sentence: str, machines: MadeUpMachines):
    assert sentence in said("up", *words, code=2 if words == ["-x=y"] else 1)


# ----- on-host -------------------------------------------------------------------------------------


def on_host(request: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["on-host", "--", "@m", request, "/x/python", "-m", "splitinfer"])
    return result.exit_code, result.stdout


def test_on_host_says_its_versions_to_another_version():
    other = json.dumps({"versions": {"protocol": 1, "splitinfer": "9", "mlx": "0", "mlx_lm": "0"}, "new": "field"})
    for request in (other, "{", "[]"):
        code, output = on_host(request)
        assert code == 3
        assert own_versions().mlx in output


def test_on_host_answers_its_own_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked = Request(Do.LOOK, own_versions(), "ab" * 32, "studio", 5577, "mini")
    code, output = on_host(asked.encode())
    assert code == 0
    seen = understand(output, "@m")
    assert getattr(seen, "program", None) == ("/x/python", "-m", "splitinfer")
    assert on_host(asked.encode().replace("look", "rm -rf")) == (1, "")
