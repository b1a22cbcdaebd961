"""Shows, starts and stops workers in the background of this machine. `splitinfer worker --show`, `--detach` and
`--stop` call it; `up` does so over ssh.

The list of processes says each time which workers run and who started them. Only one of a user's processes starts or
stops workers at a time (``_alone``), so the `up` of two machines get one worker, not two.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import psutil

from splitinfer.common.plain_text import plain
from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring, Known
from splitinfer.launch import processes
from splitinfer.launch.answer import FoundWorker, How, WorkersAnswer, last_line
from splitinfer.launch.processes import WorkerCommand, command_of, own_workers
from splitinfer.models.memory import free_bytes
from splitinfer.places import locked, of_up
from splitinfer.service.actions import Manager, manager_of
from splitinfer.service.definition import here as service_place
from splitinfer.system import processes as system_processes
from splitinfer.system.processes import Process

_START_SECONDS = 120.0  # for an interpreter and MLX to come up, on a cold and busy machine
_STOP_SECONDS = 10.0  # a worker ends within three
_POLL = 0.05
_IN_USE = " is in use"  # a worker's message
_LOG_BYTES = 2**16


never_awaited: list["subprocess.Popen[bytes]"] = []  # workers outlive the process that starts them


def show() -> WorkersAnswer:
    """Return the workers that run here. Raises ConfigError if this machine's key cannot be read."""
    memory, workers = int(psutil.virtual_memory().total), _found(system_processes.processes())
    return WorkersAnswer(own_versions(), Keyring().public(), free_bytes(), memory, workers)


def _found(running: list[Process]) -> tuple[FoundWorker, ...]:
    service = _service_pid()
    return tuple(_as_found(*each, service) for port, each in own_workers(running).items() if port)


def _as_found(process: Process, command: WorkerCommand, service: int | None) -> FoundWorker:
    port, seconds = command.port, max(0.0, time.time() - process.started)
    memory, peers = processes.memory_of(process.pid), processes.peers_of(process.pid, port)
    if (by := command.by) is not None:
        how = How.UP if by.key else How.DETACHED
        return FoundWorker(port, process.pid, how, by.name, by.key or None, str(_log(port)), memory, seconds, peers)
    how = How.SERVICE if process.pid == service else How.HAND
    return FoundWorker(port, process.pid, how, memory=memory, seconds=seconds, peers=peers)


def worker_service() -> Manager | None:
    """Return the manager of this user's worker service, or None if no such service is installed."""
    try:
        manager = manager_of(service_place())
    except ConfigError:  # a system without services
        return None
    return manager if manager.file.exists() else None


def _service_pid() -> int | None:
    manager = worker_service()
    return None if manager is None else manager.state().pid


def _log(port: int) -> Path:
    return of_up() / f"worker-{port}.log"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep other processes of this user from starting or stopping a worker during the ``with`` block."""
    try:
        with locked(of_up()):
            yield
    except OSError as error:
        raise ConfigError(f"{of_up()} cannot be used: {error}") from error


# ----- starting ------------------------------------------------------------------------------------


def start(words: Sequence[str], by: Known) -> WorkersAnswer:
    """Find the worker at the port or start one, and let it admit the machine that asks.

    ``words``: the options of the worker's command. ``by``: the machine whose `up` asks; without a key, a person asks.

    Raises:
        ConfigError: no worker was started; the sentence says why.
    """
    wanted = command_of(("splitinfer", "worker", *words))
    if wanted is None or not wanted.port:
        raise ConfigError("a worker in the background needs a port of its own")
    with _alone():
        is_new = not _is_there(wanted, by)
        if by.key and not Keyring().admits(by.key):
            Keyring().admit(by.key, plain(by.name, 60))
        Keyring().own()  # which the worker would make
        if is_new and not _start_service(wanted):
            _spawn(words, by, wanted.port)
        return replace(show(), is_new=is_new)


def _is_there(wanted: WorkerCommand, by: Known) -> bool:
    """Return whether a usable worker is at the port. Raises ConfigError if an unusable one is."""
    there = own_workers(system_processes.processes()).get(wanted.port)
    if there is not None:
        process, command = there
        _refuse_unfit(wanted, by, command)
        if command.by is None or command.versions == _versions():
            return True
        processes.end(process.pid, _STOP_SECONDS)  # the same machine's `up` started it before an update
    return False


def _refuse_unfit(wanted: WorkerCommand, by: Known, command: WorkerCommand) -> None:
    """Raise ConfigError if a running worker does not match the options given."""
    where, other = f"the worker at port {command.port}", _another(command.port)
    if command.is_loopback and not wanted.is_loopback:
        raise ConfigError(f"{where} listens to that machine only; start it with --host 0.0.0.0, end it, or {other}")
    if command.is_insecure and not wanted.is_insecure:
        raise ConfigError(
            f"{where} was started with --insecure, so it cannot be told from another one; end it, or {other}"
        )
    if command.by is not None and command.versions != _versions() and command.by.key != by.key:
        raise ConfigError(
            f"{where} was started before this version was installed; {plain(command.by.name, 60) or 'a person'} "
            "started it and must start it again"
        )


def _versions() -> str:
    """Return the installed versions as one word."""
    return "/".join(map(str, astuple(own_versions())))


def _another(port: int) -> str:
    return f"take another port, such as {port + 1 if port < 65535 else port - 1}"


def _start_service(wanted: WorkerCommand) -> bool:
    """Start the worker service if one is installed for this port. Return whether it was. Raises ConfigError if it does
    not come up."""
    manager = worker_service()
    installed = None if manager is None else manager.read(manager.file.read_bytes())
    command = None if installed is None else command_of(installed.command)
    if manager is None or command is None or command.port != wanted.port or command.is_loopback or command.is_insecure:
        return False
    manager.start()
    if not _comes_up(lambda: _service_pid() or 0, wanted.port, lambda: False):
        raise ConfigError(f"the service was started, but no worker came up at port {wanted.port}")
    return True


def _spawn(words: Sequence[str], by: Known, port: int) -> None:
    """Start a worker that outlives this process and its ssh. Raises ConfigError if it ends at once."""
    path, asker = _log(port), f"--by={by.key}:{plain(by.name, 60)}"
    with path.open("ab") as log:
        os.fchmod(log.fileno(), 0o600)
        began = log.tell()
        worker = subprocess.Popen(
            [sys.executable, "-m", "splitinfer", "worker", *words, asker, f"--versions={_versions()}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
        )  # fmt: skip
    never_awaited.append(worker)
    if not _comes_up(lambda: worker.pid, port, lambda: worker.poll() is not None):
        worker.kill()
        worker.wait()
        raise ConfigError(_why_ended(port, _tail(path, began)))


def _comes_up(pid: Callable[[], int], port: int, has_ended: Callable[[], bool]) -> bool:
    """Wait until a process listens on a port. Return False if it ends instead or takes too long."""
    give_up = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up and not has_ended():
        if processes.listens(pid(), port):
            return True
        time.sleep(_POLL)
    return False


def _why_ended(port: int, said: str) -> str:
    if _IN_USE in said:
        program = processes.listener_on(port) or "another program"
        return f"port {port} is in use by {program}; {_another(port)}"
    return f"the worker was started and ended at once: {plain(last_line(said)) or 'it said nothing'}"


def _tail(log: Path, began: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")
    return ""


# ----- stopping ------------------------------------------------------------------------------------


def stop(key: str = "") -> WorkersAnswer:
    """Stop only the workers that the machine with this key has started here, or without a key, that a person has.

    Raises:
        ConfigError: a worker does not end.
    """
    with _alone():
        how = How.UP if key else How.DETACHED
        stopped = [each for each in _found(system_processes.processes()) if each.how is how and (each.key or "") == key]
        for worker in stopped:
            processes.end(worker.pid, _STOP_SECONDS)
        return replace(show(), stopped=tuple(stopped))
