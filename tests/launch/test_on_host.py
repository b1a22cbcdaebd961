"""What runs on a machine, what is found and started there; the script of /bin/sh on made-up homes."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from splitinfer.keyring import Keyring
from splitinfer.launch import on_host, processes
from splitinfer.launch.answers import Do, How, Refusal, Request, Started, Stopped
from splitinfer.launch.on_host import carry_out
from splitinfer.launch.place import read, state_folder, write
from splitinfer.launch.processes import (
    Command,
    Process,
    Record,
    command_of,
    decode,
)
from splitinfer.launch.script import script
from splitinfer.wire.messages import Versions

VERSIONS = Versions(11, "0.1.0", "0.32.4", "0.32.2")
STUDIO, AIR = "ab" * 32, "cd" * 32
START = Request(Do.START, VERSIONS, STUDIO, "studio", 5577, "mini")
STOP = dataclasses.replace(START, do=Do.STOP)
PYTHON = ("/x/bin/python3", "-m", "splitinfer", "worker")


# ----- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/x/python -m splitinfer worker --host 0.0.0.0 --port 7000", Command("0.0.0.0", 7000)),
        ("/home/eve/.local/bin/splitinfer worker", Command()),
        ("/x/python /x/bin/splitinfer worker --insecure --host=::", Command("::", 5577, True)),
        ("/x/python -m splitinfer worker --name a --child", None),
        ("/x/python -m splitinfer coord --layout worker", None),
        ("vim splitinfer worker.py", None),
        ("grep -r splitinfer worker", None),
        ("sh less /var/log/splitinfer worker", None),
        ("splitinfer", None),
        ("", None),
        ("splitinfer worker --port x", Command(port=0)),
    ],
)
def test_which_command_lines_are_workers(line: str, command: Command | None):
    assert command_of(line.split()) == command


# ----- starting and stopping -----------------------------------------------------------------------


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Process]:
    """The processes of this machine; it has no services."""
    found = list[Process]()

    def end(pid: int, _patience: float) -> None:
        found[:] = [each for each in found if each.pid != pid]

    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(processes, "end", end)
    monkeypatch.setattr(processes, "processes", lambda: list(found))
    monkeypatch.setattr(on_host, "worker_service", lambda: None)
    return found


def of_up(process: Process, key: str, versions: Versions = VERSIONS) -> Process:
    """A process that `up` has started, as its record says."""
    port = command_of(process.words).port  # type: ignore[union-attr]
    record = Record(process.pid, process.started, port, key, {STUDIO: "studio", AIR: "air"}[key], versions)
    write(state_folder() / f"worker-{port}.json", record.encode())
    return process


def worker(pid: int = 7, *options: str, user: str = "") -> Process:
    return Process(pid, user or "eve", not user, (*PYTHON, *(options or ("--host", "0.0.0.0"))), 100.0)


def refusal() -> Refusal:
    """Why a worker is not started."""
    answer = carry_out(START, ())
    assert isinstance(answer, Refusal)
    return answer


def test_a_worker_that_runs_is_found_and_admits_who_asks(running: list[Process]):
    running.append(of_up(worker(), AIR))
    found = carry_out(START, ())
    assert isinstance(found, Started)
    assert not found.is_new
    assert (found.worker.how, found.worker.by, found.worker.is_own) == (How.UP, "air", False)
    assert found.key == Keyring().own().public
    assert Keyring().admits(STUDIO)


def test_a_worker_without_a_record_was_started_by_hand(running: list[Process]):
    running.append(worker())
    write(state_folder() / "worker-5577.json", Record(7, 50.0, 5577, STUDIO, "studio", VERSIONS).encode())
    found = carry_out(START, ())
    assert isinstance(found, Started)
    assert (found.worker.how, found.worker.is_own) == (How.HAND, False), "a number that is used again is another worker"
    stopped = carry_out(STOP, ())
    assert isinstance(stopped, Stopped)
    assert not stopped.stopped
    assert len(running) == 1


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (
            worker(7, "--host", "127.0.0.1"),
            "port 5577 listens to that machine only; start it with --host 0.0.0.0",
        ),
        (worker(7, "--insecure", "--host", "0.0.0.0"), "was started with --insecure"),
        (worker(user="anna"), "port 5577 of mini belongs to a worker of anna, another user"),
    ],
)
def test_a_worker_that_cannot_be_used_is_left_alone(running: list[Process], process: Process, why: str):
    running.append(process)
    answer = refusal()
    assert answer.other_port
    assert "take another port" in answer.text
    assert why in answer.text
    assert running == [process]
    assert not Keyring().admits(STUDIO)


def test_another_version_is_replaced_by_whose_it_is(running: list[Process], monkeypatch: pytest.MonkeyPatch):
    running.append(of_up(worker(), AIR, dataclasses.replace(VERSIONS, splitinfer="0.0.9")))
    assert "before this version was installed; air started it" in refusal().text
    assert len(running) == 1
    running.clear()
    running.append(of_up(worker(), STUDIO, dataclasses.replace(VERSIONS, splitinfer="0.0.9")))
    monkeypatch.setattr(on_host, "_spawn", lambda *_: Refusal("made up"))
    assert carry_out(START, ()) == Refusal("made up")
    assert not running


def test_down_stops_what_up_has_started_and_nothing_else(running: list[Process]):
    running.append(of_up(worker(7), STUDIO))
    running.append(of_up(worker(8, "--host", "0.0.0.0", "--port", "5578"), AIR))
    running.append(worker(9, "--host", "0.0.0.0", "--port", "5579"))
    running.append(worker(10, "--port", "5580", user="anna"))
    done = carry_out(STOP, ())
    assert isinstance(done, Stopped)
    assert [each.port for each in done.stopped] == [5577]
    assert [(each.port, each.how) for each in done.left] == [(5578, How.UP), (5579, How.HAND)]
    assert [each.pid for each in running] == [8, 9, 10]


def test_what_is_started_outlives_its_starter(running: list[Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A stand-in for a worker, which says what one says and then waits, in a session of its own."""
    code = "import signal; print('worker mini waits at tcp://0.0.0.0:5577', flush=True); signal.pause()"
    stand_in(monkeypatch, tmp_path, code)
    started = carry_out(START, ())
    assert isinstance(started, Started)
    try:
        assert started.is_new
        assert started.worker.is_own
        assert os.getsid(started.worker.pid) == started.worker.pid
        assert Keyring().admits(STUDIO)
        record = decode(read(state_folder() / "worker-5577.json"))
        assert record is not None
        assert (record.pid, record.key) == (started.worker.pid, STUDIO)
        assert Path(started.log).stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(started.worker.pid, signal.SIGKILL)
        on_host.never_awaited.pop().wait()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            "12:00:00 up\\nsplitinfer: no such model",
            "on mini was started and ended at once: splitinfer: no such",
        ),
        (
            "tcp://0.0.0.0:5577 is in use; is a worker running?",
            "port 5577 of mini is in use by another program",
        ),
        ("", "ended at once: it said nothing"),
    ],
)
def test_a_worker_that_ends_at_once_says_why(
    running: list[Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, answer: str
):
    stand_in(monkeypatch, tmp_path, f"import sys; sys.stderr.write({said!r}.replace('\\\\n', chr(10)))")
    monkeypatch.setattr(processes, "listener_on", lambda _port: "")
    state_folder().mkdir(parents=True)
    (state_folder() / "worker-5577.log").write_text("of an earlier worker: waits at tcp://0.0.0.0:5577\n")
    assert answer in refusal().text


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let workers be this code, in a Python that starts quickly."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "$(cat {tmp_path}/code)"\n')
    (tmp_path / "code").write_text(code)
    program.chmod(0o755)
    monkeypatch.setattr(on_host.sys, "executable", str(program))


@pytest.mark.parametrize("is_awaited", [True, False], ids=["awaited", "a zombie"])
def test_a_process_is_ended_also_where_nobody_takes_note(is_awaited: bool):
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        process = psutil.Process(child.pid)
        if is_awaited:
            threading.Thread(target=child.wait, daemon=True).start()
        processes.end(child.pid, 60.0)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        processes.end(child.pid, 60.0)


# ----- the script ----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def install(path: Path, code: int = 0) -> None:
    """A program that prints how it was called, and ends with a code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncat\nprintf "%s\\n" "$3 $4 by $5"\nexit {code}\n')
    path.chmod(0o755)


def run(home: Path, text: str) -> list[str]:
    """What the script prints for a user whose PATH has the system's programs alone."""
    done = subprocess.run(
        ["/bin/sh", "-s"], input=text, env={"HOME": str(home), "PATH": "/nowhere:/usr/bin:/bin"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


REQUEST = """{"by": "eve's \\"Mac\\" $HOME `reboot` \\\\", "x": "*"}"""


def test_the_script_finds_programs_that_are_not_on_the_path(home: Path):
    program = home / ".local/bin/splitinfer"
    install(program)
    assert run(home, script("@m", REQUEST)) == [f"@m {REQUEST} by {program}"]


def test_the_script_looks_on_behind_another_version(home: Path):
    install(home / ".local/bin/splitinfer", 3)
    program = home / "my src/.venv/bin/splitinfer"
    install(program)
    lines = run(home, script("@m", "{}", (), "/Users/eve/my src/.venv/bin/splitinfer", "/Users/eve"))
    assert lines == [f"@m {{}} by {home}/.local/bin/splitinfer", f"@m {{}} by {program}"]


def test_the_script_says_what_did_not_run(home: Path):
    program = home / ".local/bin/splitinfer"
    install(program, 2)
    lines = run(home, script("@m", "{}"))
    assert lines[1] == f"@m failed {program}"
    assert lines[-1] == "@m none"


def test_the_script_begins_with_what_answered_before(home: Path):
    install(home / ".local/bin/splitinfer")
    other = home / "o'ther/splitinfer"
    install(other)
    assert run(home, script("@m", "{}", (str(other),))) == [f"@m {{}} by {other}"]
