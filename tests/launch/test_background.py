"""Workers in the background of a machine: which are found, started and stopped."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import astuple, replace
from pathlib import Path

import psutil
import pytest

from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring, Known
from splitinfer.launch import background, processes
from splitinfer.launch.answer import How
from splitinfer.launch.background import start, stop
from splitinfer.launch.processes import WorkerCommand, command_of
from splitinfer.places import of_up
from splitinfer.system import processes as system_processes
from splitinfer.system.processes import Process

STUDIO, AIR = Known("ab" * 32, "studio"), Known("cd" * 32, "air")
WANTED = ("--host", "0.0.0.0", "--port", "5577", "--name", "mini"), STUDIO
PYTHON = ("/x/bin/python3", "-m", "splitinfer", "worker")


# ----- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/x/python -m splitinfer worker --host 0.0.0.0 --port 7000", WorkerCommand("0.0.0.0", 7000)),
        ("/home/eve/.local/bin/splitinfer worker", WorkerCommand()),
        ("/x/python /x/bin/splitinfer worker --insecure --host=::", WorkerCommand("::", 5577, True)),
        ("/x/python -m splitinfer worker --name a --child", None),
        ("/x/bin/splitinfer worker --detach --host 0.0.0.0 --port 7000", None),
        ("/x/bin/splitinfer worker --show", None),
        ("/x/python -m splitinfer coord --layout worker", None),
        ("vim splitinfer worker.py", None),
        ("grep -r splitinfer worker", None),
        ("sh less /var/log/splitinfer worker", None),
        ("splitinfer", None),
        ("", None),
        ("splitinfer worker --port x", WorkerCommand(port=0)),
    ],
)
def test_which_command_lines_are_workers(line: str, command: WorkerCommand | None):
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
    monkeypatch.setattr(system_processes, "processes", lambda: list(found))
    monkeypatch.setattr(background, "worker_service", lambda: None)
    return found


def in_background(process: Process, by: Known, splitinfer: str = own_versions().splitinfer) -> Process:
    """A process that was started in the background."""
    versions = "/".join(map(str, astuple(replace(own_versions(), splitinfer=splitinfer))))
    return replace(process, words=(*process.words, f"--by={by.key}:{by.name}", f"--versions={versions}"))


def worker(pid: int = 7, *options: str) -> Process:
    return Process(pid, (*PYTHON, *(options or ("--host", "0.0.0.0"))), 100.0)


def test_a_worker_that_runs_is_found_and_admits_who_asks(running: list[Process]):
    running.append(in_background(worker(), AIR))
    found = start(*WANTED)
    assert not found.is_new
    assert [(each.how, each.by, each.key) for each in found.workers] == [(How.UP, "air", AIR.key)]
    assert found.key == Keyring().own().public
    assert Keyring().admits(STUDIO.key)


def test_a_worker_that_was_not_started_in_the_background_was_started_by_hand(running: list[Process]):
    running.append(worker())
    (found,) = start(*WANTED).workers
    assert (found.how, found.key) == (How.HAND, None)
    assert not stop(STUDIO.key).stopped
    assert len(running) == 1


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (worker(7, "--host", "127.0.0.1"), "port 5577 listens to that machine only; start it with --host 0.0.0.0"),
        (worker(7, "--insecure", "--host", "0.0.0.0"), "was started with --insecure"),
    ],
)
def test_a_worker_that_cannot_be_used_is_left_alone(running: list[Process], process: Process, why: str):
    running.append(process)
    with pytest.raises(ConfigError, match=f"{why}.*take another port, such as 5578"):
        start(*WANTED)
    assert running == [process]
    assert not Keyring().admits(STUDIO.key)


def test_another_version_is_replaced_by_whose_it_is(running: list[Process], monkeypatch: pytest.MonkeyPatch):
    spawned = list[int]()
    monkeypatch.setattr(background, "_spawn", lambda _words, _by, port: spawned.append(port))
    running.append(in_background(worker(), AIR, "0.0.9"))
    with pytest.raises(ConfigError, match="before this version was installed; air started it"):
        start(*WANTED)
    assert (len(running), spawned) == (1, [])
    running[:] = [in_background(worker(), STUDIO, "0.0.9")]
    assert start(*WANTED).is_new
    assert (len(running), spawned) == (0, [5577])


def test_down_stops_what_up_has_started_and_nothing_else(running: list[Process]):
    running.append(in_background(worker(7), STUDIO))
    running.append(in_background(worker(8, "--host", "0.0.0.0", "--port", "5578"), AIR))
    running.append(worker(9, "--host", "0.0.0.0", "--port", "5579"))
    running.append(in_background(worker(11, "--port", "5581"), Known("", "")))
    done = stop(STUDIO.key)
    assert [each.port for each in done.stopped] == [5577]
    left = [(5578, How.UP), (5579, How.HAND), (5581, How.DETACHED)]
    assert [(each.port, each.how) for each in done.workers] == left
    assert [each.port for each in stop().stopped] == [5581]
    assert [each.pid for each in running] == [8, 9]


def test_what_is_started_outlives_its_starter(running: list[Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A stand-in for a worker, which listens and then waits, in a session of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"import signal, socket; s = socket.create_server(('127.0.0.1', {port})); signal.pause()"
    stand_in(monkeypatch, tmp_path, code)
    started = start(("--host", "0.0.0.0", "--port", str(port)), STUDIO)
    pid = background.never_awaited[-1].pid
    try:
        assert started.is_new
        assert os.getsid(pid) == pid
        command = command_of(("splitinfer", *(tmp_path / "words").read_text().splitlines()))
        assert (command.port, command.by, "/" in command.versions) == (port, STUDIO, True)
        assert Keyring().admits(STUDIO.key)
        assert (of_up() / f"worker-{port}.log").stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(pid, signal.SIGKILL)
        background.never_awaited.pop().wait()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("12:00:00 up\\nsplitinfer: no such model", "started and ended at once: splitinfer: no such"),
        ("tcp://0.0.0.0:5577 is in use; is a worker running?", "port 5577 is in use by another program; take another"),
        ("", "ended at once: it said nothing"),
    ],
)
def test_a_worker_that_ends_at_once_says_why(
    running: list[Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, why: str
):
    stand_in(monkeypatch, tmp_path, f"import sys; sys.stderr.write({said!r}.replace('\\\\n', chr(10)))")
    monkeypatch.setattr(processes, "listener_on", lambda _port: "")
    of_up().mkdir(parents=True)
    (of_up() / "worker-5577.log").write_text("of an earlier worker: tcp://0.0.0.0:5577 is in use\n")
    with pytest.raises(ConfigError, match=why):
        start(*WANTED)


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let workers be this code, in a Python that starts quickly."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\nshift 2; printf "%s\\n" "$@" >{tmp_path}/words\n'
        f'exec {sys.executable} -S -c "$(cat {tmp_path}/code)"\n'
    )
    (tmp_path / "code").write_text(code)
    program.chmod(0o755)
    monkeypatch.setattr(background.sys, "executable", str(program))


def test_a_worker_in_the_background_needs_a_port_of_its_own():
    with pytest.raises(ConfigError, match="needs a port of its own"):
        start(("--port", "0"), Known("", ""))


@pytest.mark.parametrize("is_awaited", [True, False], ids=["awaited", "a zombie"])
def test_a_process_is_ended_also_where_nobody_takes_note(is_awaited: bool):
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        process = psutil.Process(child.pid)
        if is_awaited:
            threading.Thread(target=child.wait, daemon=True).start()
        processes.end(child.pid, 60.0)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        processes.end(child.pid, 60.0)
