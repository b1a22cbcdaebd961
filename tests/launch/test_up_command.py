"""`splitinfer up`, `down`, `status` and `on-host`, between the command line and machines that are made up."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_launch_steps import AIR, MINI, OWN, SEEN, STARTED, WORKER
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError
from splitinfer.launch.answers import Do, Refusal, Request, Stopped, encode, understand
from splitinfer.launch.hosts import Host, Last, from_words
from splitinfer.launch.place import state_folder
from splitinfer.launch.ssh import Ended
from splitinfer.launch.steps import Steps
from splitinfer.shutdown import shutdown

command = importlib.import_module("splitinfer.cli.up")  # the package has the command by that name


class MadeUpMachines:
    """Answers by what is asked; ``broken``: hosts that refuse."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def run(self, host: Host, script: str) -> Ended:
        mark = script.split("mark=")[1].split("\n")[0]
        asked = json.loads(script.split("request='")[1].split("'\n")[0])["do"]
        answers = {Do.LOOK: SEEN, Do.START: STARTED, Do.STOP: Stopped((WORKER,), ())}
        answer = Refusal("the port is in use by another program") if host.name in self.broken else answers[asked]
        return Ended(0, f"{mark} {encode(answer)}\n")

    def hostname(self, host: Host) -> str:
        return f"{host.name}.local"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpMachines:
    made = MadeUpMachines()

    @contextmanager
    def steps() -> Iterator[tuple[Steps, MadeUpMachines]]:
        yield Steps(OWN, made.run, command._print), made

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


def test_one_that_fails_is_named_and_all_are_remembered(machines: MadeUpMachines, capsys: pytest.CaptureFixture[str]):
    machines.broken = {"air"}
    last = Last(from_words(["mini", "air"]), "demo")
    with pytest.raises(ConfigError, match=r"^air did not start; the other hosts are unchanged"):
        command._bring_up(last)
    said = capsys.readouterr().err
    assert "worker started, port 5577" in said
    assert "in use by another program" in said
    assert not (state_folder() / "layout.yaml").exists()
    assert command._meant((), None, 5577, None) == last


def test_down_and_status_end_with_what_they_found(machines: MadeUpMachines, capsys: pytest.CaptureFixture[str]):
    hosts = (MINI, AIR)
    assert (command._down(hosts), command._status(hosts)) == (0, 0)
    said = capsys.readouterr()
    assert "mini: the worker at port 5577 is stopped" in said.err
    assert "40.0 of 64.0 GB" in " ".join(said.out.split())
    machines.broken = {"air"}
    assert (command._down(hosts), command._status(hosts)) == (1, 1)


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_wrong_words_are_one_sentence(
    words: list[str], said: str, machines: MadeUpMachines, monkeypatch: pytest.MonkeyPatch
):
    def finish(run: object, *_: object, **__: object) -> None:
        run()  # type: ignore[operator]

    monkeypatch.setattr(command, "finish", finish)
    result = CliRunner().invoke(app, ["up", *words])
    assert said in str(result.exception) + result.output


# ----- on-host -------------------------------------------------------------------------------------


def on_host(monkeypatch: pytest.MonkeyPatch, request: str) -> tuple[int, str]:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(shutdown, "exit", leave)
    result = CliRunner().invoke(app, ["on-host", "--", "@m", request, "/x/python", "-m", "splitinfer"])
    return result.exit_code, result.stdout


def test_on_host_says_its_versions_to_another_version(monkeypatch: pytest.MonkeyPatch):
    other = json.dumps({"versions": {"protocol": 1, "splitinfer": "9", "mlx": "0", "mlx_lm": "0"}, "new": "field"})
    for request in (other, "{", "[]"):
        code, output = on_host(monkeypatch, request)
        assert code == 3
        assert own_versions().mlx in output


def test_on_host_answers_its_own_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked = Request(Do.LOOK, own_versions(), "ab" * 32, "studio", 5577, "mini")
    code, output = on_host(monkeypatch, asked.encode())
    assert code == 0
    seen = understand(output, "@m")
    assert getattr(seen, "program", None) == ("/x/python", "-m", "splitinfer")
    code, output = on_host(monkeypatch, asked.encode().replace("look", "rm -rf"))
    assert (code, output) == (1, "")
