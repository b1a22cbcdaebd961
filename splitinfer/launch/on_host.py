"""The side of `up` that runs on the other machine: looks, starts a worker, stops one. `splitinfer on-host` calls it.

What runs is read from the list of processes each time; records only say who had what started. One of a user's
processes starts or stops at a time (``place.locked``), so two `up` of two machines get one worker and not two.
"""

import contextlib
import getpass
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring
from splitinfer.launch import processes
from splitinfer.launch.answers import (
    Answer,
    Do,
    Found,
    How,
    Refusal,
    Request,
    Seen,
    Started,
    Stopped,
    last_line,
    plain,
)
from splitinfer.launch.place import locked, read, state_folder, write
from splitinfer.launch.processes import Command, Process, Record, command_of, decode, holds, others_workers, own_workers
from splitinfer.models.memory import free_bytes
from splitinfer.service.actions import Manager, manager_of
from splitinfer.service.place import here as service_place

_START_SECONDS = 120.0  # for an interpreter and MLX to come up, on a cold and busy machine
_STOP_SECONDS = 10.0  # a worker ends within three
_POLL = 0.05
_WAITS, _IN_USE = " waits at ", " is in use"  # what a worker logs
_LOG_BYTES = 2**16


never_awaited: list["subprocess.Popen[bytes]"] = []  # workers outlive the process that starts them


def worker_service() -> Manager | None:
    """The manager of this user's worker service; ``None`` where there can be none."""
    try:
        return manager_of(service_place())
    except ConfigError:  # a system without services
        return None


def _record(port: int) -> Record | None:
    return decode(read(state_folder() / f"worker-{port}.json"))


def _log(port: int) -> Path:
    return state_folder() / f"worker-{port}.log"


def carry_out(request: Request, program: tuple[str, ...]) -> Answer:
    """Do what a request of the same version asks; every failure is an answer. ``program``: the words of the command
    that runs."""
    try:
        match request.do:
            case Do.LOOK:
                return look(request, program)
            case Do.START:
                with locked():
                    return start(request)
            case Do.STOP:
                with locked():
                    return stop(request)
    except (ConfigError, OSError, psutil.Error) as error:
        return Refusal(f"{request.name}: {error}")


def look(request: Request, program: tuple[str, ...]) -> Seen:
    """What is here."""
    running = processes.processes()
    return Seen(
        request.versions,
        program,
        free_bytes(),
        int(psutil.virtual_memory().total),
        _found(request, running),
        {port: user for port, user in others_workers(running).items() if port},
    )


def _found(request: Request, running: list[Process]) -> tuple[Found, ...]:
    service = _service_pid()
    workers = own_workers(running)
    return tuple(_as_found(request, each, port, service) for port, (each, _) in workers.items() if port)


def _as_found(request: Request, process: Process, port: int, service: int | None) -> Found:
    record = _record(port)
    is_of_up = holds(record, process)
    how = How.UP if is_of_up else How.SERVICE if process.pid == service else How.HAND
    by, is_own = (record.by, record.key == request.key) if record is not None and is_of_up else ("", False)
    seconds = max(0.0, time.time() - process.started)
    memory, peers = processes.memory_of(process.pid), processes.peers_of(process.pid, port)
    return Found(port, process.pid, how, by, is_own, memory, seconds, peers)


def _service_pid() -> int | None:
    manager = worker_service()
    return None if manager is None or not manager.file.exists() else manager.state().pid


# ----- starting ------------------------------------------------------------------------------------


def start(request: Request) -> Started | Refusal:
    """Find the worker at the port, or start one; then it admits the machine that asks."""
    running = processes.processes()
    there = own_workers(running).get(request.port)
    if there is not None:
        process, command = there
        record = _record(request.port)
        is_of_up = record is not None and holds(record, process)
        refusal = _unfit(request, command, record if is_of_up else None)
        if refusal is not None:
            return refusal
        if record is None or not is_of_up or record.versions == request.versions:
            return _ready(request, process, is_new=False)
        processes.end(process.pid, _STOP_SECONDS)  # of this machine's own `up`, before an update
    elif (user := others_workers(running).get(request.port)) is not None:
        where = f"port {request.port} of {request.name} belongs to a worker of {user}, another user of that machine"
        return Refusal(f"{where}; it was left alone; take another port, if there is memory for both", other_port=True)
    _admit(request)
    return _started(request) if _start_service(request) else _spawn(request)


def _unfit(request: Request, command: Command, record: Record | None) -> Refusal | None:
    """Why a worker that runs cannot be used; ``None``: it can be, or replaced. ``record``: of the `up` that started
    it."""
    where = f"the worker on {request.name} at port {request.port}"
    if command.is_loopback:
        end = "start it with --host 0.0.0.0, end it, or take another port"
        return Refusal(f"{where} listens to that machine only; {end}", other_port=True)
    if command.is_insecure:
        why = "was started with --insecure, so it cannot be told from another one"
        return Refusal(f"{where} {why}; end it, or take another port", other_port=True)
    if record is not None and record.versions != request.versions and record.key != request.key:
        started = "was started before this version was installed"
        return Refusal(f"{where} {started}; {plain(record.by, 60)} started it and must start it again")
    return None


def _admit(request: Request) -> None:
    keyring = Keyring()
    if not keyring.admits(request.key):
        keyring.admit(request.key, plain(request.by, 60))


def _ready(request: Request, process: Process, *, is_new: bool) -> Started:
    _admit(request)
    found = _as_found(request, process, request.port, _service_pid())
    log = str(_log(request.port)) if found.how is How.UP else ""
    return Started(Keyring().own().public, found, is_new, log)


def _start_service(request: Request) -> bool:
    """Start the worker service if one is installed for this port and does not run; whether it was."""
    manager = worker_service()
    if manager is None or not manager.file.exists():
        return False
    installed = manager.read(manager.file.read_bytes())
    command = None if installed is None else command_of(installed.command)
    if command is None or command.port != request.port or command.is_loopback or command.is_insecure:
        return False
    manager.start()
    return True


def _started(request: Request) -> Started | Refusal:
    """Wait until the service's worker is there."""
    give_up = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up:
        there = own_workers(processes.processes()).get(request.port)
        if there is not None and processes.listens(there[0].pid, request.port):
            return _ready(request, there[0], is_new=True)
        time.sleep(_POLL)
    return Refusal(f"{request.name}: the service was started, but no worker came up at port {request.port}")


def _spawn(request: Request) -> Started | Refusal:
    """Start a worker that outlives this process and its ssh."""
    path = _log(request.port)
    command = [sys.executable, "-m", "splitinfer", "worker", "--host", "0.0.0.0", "--port", str(request.port),
               "--name", plain(request.name, 60)]  # fmt: skip
    with path.open("ab") as log:
        os.fchmod(log.fileno(), 0o600)
        began = log.tell()
        worker = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    made = Record(
        worker.pid, processes.start_of(worker.pid), request.port, request.key, plain(request.by, 60), request.versions
    )
    write(state_folder() / f"worker-{request.port}.json", made.encode())
    never_awaited.append(worker)
    if not _comes_up(worker, path, began):
        return _why_ended(request, _tail(path, began))
    process = Process(worker.pid, getpass.getuser(), True, tuple(command), made.started)
    return _ready(request, process, is_new=True)


def _comes_up(worker: "subprocess.Popen[bytes]", log: Path, began: int) -> bool:
    """Wait until a worker listens; false if it ends instead, or takes too long, and is ended."""
    give_up = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up:
        has_ended = worker.poll() is not None  # before the log is read: it may say so and end in between
        if _WAITS in _tail(log, began):
            return True
        if has_ended:
            return False
        time.sleep(_POLL)
    worker.kill()
    worker.wait()
    return False


def _why_ended(request: Request, said: str) -> Refusal:
    if _IN_USE in said:
        program = processes.listener_on(request.port) or "another program"
        where = f"port {request.port} of {request.name} is in use by {program}"
        return Refusal(f"{where}; take another port", other_port=True)
    why = plain(last_line(said)) or "it said nothing"
    return Refusal(f"the worker on {request.name} was started and ended at once: {why}")


def _tail(log: Path, began: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")
    return ""


# ----- stopping ------------------------------------------------------------------------------------


def stop(request: Request) -> Stopped:
    """Stop the workers that `up` has started for the machine that asks, and no others."""
    found = _found(request, processes.processes())
    for worker in found:
        if worker.is_own:
            processes.end(worker.pid, _STOP_SECONDS)
            (state_folder() / f"worker-{worker.port}.json").unlink(missing_ok=True)
    return Stopped(tuple(each for each in found if each.is_own), tuple(each for each in found if not each.is_own))
