"""`splitinfer up`, `down` and `status`, between the command line and machines that are made up."""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch_steps import OWN, SEEN, STARTED, WORKER
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.cli.options import ChatOptions
from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ConfigError, ModelError, Refused
from splitinfer.keyring import Known
from splitinfer.launch import background
from splitinfer.launch.answer import encode, understand
from splitinfer.launch.hosts import Host, Last, from_words
from splitinfer.launch.steps import LaunchSteps
from splitinfer.places import of_up, write
from splitinfer.system.command import Done

command = importlib.import_module("splitinfer.cli.up")  # the package has the command by that name


class MadeUpMachines:
    """Answers by what is asked; ``broken``: hosts that refuse."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def run(self, host: Host, script: str) -> Done:
        if host.name in self.broken:
            return Done(1, "", "splitinfer: the port is in use by another program")
        asked = next(each for each in ("--show", "--detach", "--stop") if each in script)
        workers = (replace(WORKER, port=host.port),)
        stopped = replace(SEEN, stopped=workers)
        answers = {"--show": SEEN, "--detach": replace(STARTED, workers=workers), "--stop": stopped}
        return Done(0, encode(answers[asked]))

    def hostname(self, host: Host) -> str:
        return f"{host.name}.local"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpMachines:
    made = MadeUpMachines()

    @contextmanager
    def steps(**_: bool) -> Iterator[tuple[LaunchSteps, MadeUpMachines]]:
        yield LaunchSteps(OWN, made.run, command._print), made

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "_steps", steps)
    return made


def test_up_remembers_and_knows_the_workers(machines: MadeUpMachines):
    last = Last(from_words(["eve@mini.local", "air:7000"]), "demo")
    assert command._bring_up(last) == [
        {"name": "mini", "address": "tcp://mini.local:5577", "key": STARTED.key},
        {"name": "air", "address": "tcp://air.local:7000", "key": STARTED.key},
    ]
    assert command._meant((), None, 5577, None) == last
    assert command._known((), None) == last.hosts


def test_to_bring_a_lost_worker_back_is_no_error(monkeypatch: pytest.MonkeyPatch, machines: MadeUpMachines):
    def refuse(*_: object) -> None:
        raise Refused("worker mini refused: the worker is busy with studio")

    monkeypatch.setattr(command, "_planned", refuse)
    with pytest.raises(Refused):
        command._prepare(ChatOptions(), "demo", [])
    write(of_up() / "layout.yaml", "stages: []\n")
    assert command._prepare(ChatOptions(), "demo", []) == 0


def test_a_machine_that_is_named_twice_is_told(machines: MadeUpMachines):
    with pytest.raises(ConfigError, match=r"^mini and air have the same key: they are one machine"):
        command._bring_up(Last(from_words(["mini", "air"]), "demo"))
    assert not (of_up() / "last.json").exists()


def test_a_model_is_known_before_anything_is_done_and_from_every_folder(
    machines: MadeUpMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ModelError, match="there is no model"):
        command._meant(["mini"], None, 5577, "./nothing")
    shutil.copytree(DEMO_MODELS["demo"], tmp_path / "tale")
    monkeypatch.chdir(tmp_path)
    assert command._meant(["mini"], None, 5577, "./tale").model == str(tmp_path / "tale")


def test_one_that_fails_is_named_and_all_are_remembered(machines: MadeUpMachines, capsys: pytest.CaptureFixture[str]):
    machines.broken = {"air"}
    last = Last(from_words(["mini", "air"]), "demo")
    with pytest.raises(ConfigError, match=r"^air did not start; the other hosts are unchanged\. Fix it"):
        command._bring_up(last)
    said = capsys.readouterr().err
    assert "worker started, port 5577" in said
    assert "in use by another program" in said
    assert not (of_up() / "layout.yaml").exists()
    assert command._meant((), None, 5577, None) == last


def test_down_and_status_end_with_what_they_found(
    machines: MadeUpMachines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:  # without `up`, what announces itself is what is known
        patch.setattr(command, "discover", lambda: 7)
        assert command.status() == 7
    assert [command.down(["mini", "air"]), command.status(["mini", "air"])] == [0, 0]
    said = capsys.readouterr()
    assert "mini: the worker at port 5577 is stopped" in said.err
    assert "40.0 of 64.0 GB" in " ".join(said.out.split())
    machines.broken = {"air"}
    assert [command.down(["mini", "air"]), command.status(["mini", "air"])] == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-x=y"], "No such option"),
        (["a b", "--model", "demo"], "a host is "),
        ([], "no host is known yet"),
        (["mini"], "no model is known yet"),
        (["mini", "--serve", "1", "--prepare"], "give one of them"),
        (["mini", "--hostfile", "/nowhere", "--model", "demo"], "not both"),
        (["--hostfile", "/nowhere", "--model", "demo"], "there is no hostfile"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], said: str, machines: MadeUpMachines):
    result = CliRunner().invoke(app, ["up", *words])
    assert said in str(result.exception) + result.output


# ----- on the other machine ------------------------------------------------------------------------


def test_a_worker_in_the_background_is_one_line_of_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    wanted = list[tuple[list[str], Known]]()
    monkeypatch.setattr(background, "start", lambda *each: wanted.append(each) or STARTED)
    words = ["worker", "--detach", "--host", "0.0.0.0", "--port", "7000", f"--by={OWN.key}:studio", "--json"]
    monkeypatch.setattr("sys.argv", ["splitinfer", *words])
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, understand(result.stdout, STARTED.versions)) == (0, STARTED)
    assert wanted == [(["--host", "0.0.0.0", "--port", "7000"], Known(OWN.key, "studio"))]
    assert CliRunner().invoke(app, ["worker", "--show", "--stop"]).exit_code == 2
    assert CliRunner().invoke(app, ["worker", "--json"]).exit_code == 2
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("splitinfer.system.processes.processes", list)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert CliRunner().invoke(app, ["worker", "--show"]).stdout == "no worker runs\n"
    assert CliRunner().invoke(app, ["worker", "--stop"]).stdout.startswith("nothing was stopped: no worker of --detach")
    assert not any(tmp_path.rglob("key"))  # who only looks makes no keys
