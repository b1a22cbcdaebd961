"""`splitinfer service` from the command line, on a stand-in of systemd."""

from pathlib import Path

import pytest
from stand_ins import StandIns
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.service import definition
from splitinfer.service import definition as places


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    made = StandIns(tmp_path, "linux", monkeypatch)
    monkeypatch.setattr(places, "here", lambda: made.place)
    monkeypatch.setattr(definition, "find_executable", lambda: "/home/me/.local/bin/splitinfer")
    return made


def called(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["service", *words], standalone_mode=False)
    wrong = getattr(done.exception, "exit_code", 1) if done.exception else 0
    return done.return_value or wrong, " ".join(done.output.split())


def command(there: StandIns) -> str:
    text = (there.place.home / ".config/systemd/user/splitinfer-worker.service").read_text()
    return next(line for line in text.splitlines() if line.startswith("ExecStart="))


def test_a_worker_is_installed_seen_and_removed(there: StandIns):
    code, said = called("install", "--host", "0.0.0.0", "--kv-disk-gb", "50", "--verbose")
    assert (code, "the worker runs; its log: journalctl" in said, "this machine only" in said) == (0, True, False)
    assert command(there) == (
        'ExecStart=:"/home/me/.local/bin/splitinfer" "worker" "--host" "0.0.0.0" "--port" "5577"'
        ' "--kv-disk-gb" "50.0" "--verbose"'
    )
    assert called("install", "--host", "0.0.0.0", "--kv-disk-gb", "50", "--verbose")[1] == (
        "the worker runs already, with these options; --force starts it anew"
    )
    code, said = called("status")
    assert (code, said.startswith("worker: runs, process 4242 command /home/me/.local/bin/splitinfer worker")) == (
        0,
        True,
    )
    assert called("remove") == (0, "the worker is removed")
    assert called("status")[0] == 1
    assert called("remove") == (0, "the worker is not installed")


def test_folders_are_absolute_and_the_default_is_written_down(
    there: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    said = called("install", "--model", "my model", "--kv-dir", "none", "--no-announce")[1]
    assert "with --host 0.0.0.0 other machines reach it" in said
    assert command(there).endswith(
        f'"--host" "127.0.0.1" "--port" "5577" "--model" "{tmp_path}/my model" "--kv-dir" "none" "--no-announce"'
    )


@pytest.mark.parametrize("words", [["--port", "0"], ["--port", "70000"], ["--prot", "1"], ["--child"], ["--detach"]])
def test_what_the_worker_would_not_take_is_not_installed(words: list[str], there: StandIns):
    assert called("install", *words)[0] == 2
    assert there.calls() == []
