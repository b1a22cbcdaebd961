"""What is installed: the texts of a property list and a unit, and what is read back from them and from the system."""

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stand_ins import ASKED, LAUNCHD_FAILED, LAUNCHD_RUNNING, SYSTEMD_FAILED, SYSTEMD_RUNNING, WORDS

from splitinfer.service import launchd, systemd
from splitinfer.service.definition import UNIT, Definition, ServicePlace, State, carried
from splitinfer.service.launchd import Launchd
from splitinfer.service.systemd import Systemd

PLACE = ServicePlace("darwin", Path("/Users/me"), 501)
AGENT, USER_UNIT = Launchd(PLACE), Systemd(PLACE)
ODD = ("we ird", "%h $HOME ${HOME} `id`", '"quoted"', "it's", "back\\slash \\n", ";", "ü 🐺", "")

words = st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"])), min_size=1, max_size=5)


def test_an_agent_is_not_throttled_and_comes_back_after_a_failure():
    described = plistlib.loads(AGENT.text(ASKED))
    assert described == {
        "Label": "io.splitinfer.worker",
        "ProgramArguments": list(WORDS),
        "EnvironmentVariables": {"HF_HOME": "/Volumes/Models/hf"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 20,
        "ProcessType": "Interactive",
        "StandardOutPath": "/Users/me/Library/Logs/splitinfer/worker.log",
        "StandardErrorPath": "/Users/me/Library/Logs/splitinfer/worker.log",
    }


def test_a_unit_comes_back_after_a_failure():
    lines = USER_UNIT.text(ASKED).decode().splitlines()
    assert 'ExecStart=:"/Users/me/.local/bin/splitinfer" "worker" "--host" "0.0.0.0" "--port" "5577"' in lines
    assert 'Environment="HF_HOME=/Volumes/Models/hf"' in lines
    assert {"Type=exec", "Restart=on-failure", "KillMode=mixed", "TimeoutStopSec=20", "WantedBy=default.target"} <= {
        *lines
    }


@given(words)
@example(list(ODD))
def test_words_come_back_as_they_were(command: list[str]):
    definition = Definition(("/a b/splitinfer", *command), {"HF_HOME": command[0]})
    for manager in (AGENT, USER_UNIT):
        assert manager.read(manager.text(definition)) == definition


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "a b%h$x ü"
    program.write_text("#!/bin/sh")
    program.chmod(0o755)
    file = tmp_path / UNIT
    command = ("systemd-analyze", "--user", "verify", str(file))
    file.write_bytes(USER_UNIT.text(Definition((str(program), *ODD, "tab\there\nand a line"), {"HF_HOME": ODD[1]})))
    taken = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (taken.returncode, taken.stderr) == (0, "")
    file.write_bytes(USER_UNIT.text(Definition((str(tmp_path / "gone"),))))
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode != 0


# ----- what the system says ------------------------------------------------------------------------


def launchd_state(*changes: tuple[str, str]) -> State:
    text = LAUNCHD_RUNNING
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return launchd.state(text)


def test_launchd_says_whether_it_runs():
    assert launchd_state() == State(is_loaded=True, pid=4242, starts=1)
    assert launchd_state(("state = running", "state = xpcproxy")).pid == 4242
    assert launchd_state(("state = running", "state = not running")).pid is None
    assert launchd.state(LAUNCHD_FAILED) == State(is_loaded=True, starts=3, last_exit="exit code 1")
    assert launchd.state("something else") == State(is_loaded=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("last exit code = 0", "exit code 0"),
        ("last exit code = 78: EX_CONFIG", "exit code 78: the program could not be started"),
        ("last terminating signal = Killed: 9", "signal 9"),
    ],
)
def test_launchd_says_how_it_ended(line: str, said: str):
    assert launchd_state(("last exit code = (never exited)", line)).last_exit == said


def test_systemd_says_whether_it_runs_and_how_it_ended():
    assert systemd.state(SYSTEMD_RUNNING) == State(is_loaded=True, pid=4242, starts=1)
    assert systemd.state(SYSTEMD_FAILED) == State(is_loaded=True, starts=2, last_exit="exit code 1")
    killed = SYSTEMD_FAILED.replace("ExecMainCode=1", "ExecMainCode=2").replace("Status=1", "Status=9")
    assert systemd.state(killed).last_exit == "signal 9"
    given_up = systemd.state(SYSTEMD_FAILED.replace("Result=exit-code", "Result=start-limit-hit"))
    assert given_up.last_exit == "it ended too often, and is not started any more"
    assert systemd.state("LoadState=not-found\nMainPID=0\n") == State(is_loaded=False)


# ----- what a service takes along ------------------------------------------------------------------


def test_a_service_finds_keys_and_models_and_gets_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    shell = {
        "HF_TOKEN": "hf_secret",
        "HF_HOME": "models",
        "XDG_CONFIG_HOME": "/x",
        "HF_HUB_OFFLINE": "1",
        "PATH": "/bin",
    }
    taken = {"HF_HOME": str(tmp_path / "models"), "XDG_CONFIG_HOME": "/x", "HF_HUB_OFFLINE": "1"}
    assert carried({**shell, "XDG_CACHE_HOME": ""}) == taken
