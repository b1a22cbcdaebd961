"""Runs a worker process: listens, prints its address, serves coordinators, and stops when the process is to end."""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable

import psutil

from splitinfer.cli.options import WorkerOptions, words_of
from splitinfer.common.endpoint import Endpoint, is_loopback
from splitinfer.discovery.announcement import Announcement, announced_name, fingerprint_of, new_id, short
from splitinfer.discovery.announcer import Announcing
from splitinfer.engine.fleet.local_workers import LocalWorker
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring
from splitinfer.kvstore.store import seconds_to_close
from splitinfer.shutdown import Closing, shutdown
from splitinfer.system.ledger import join_group
from transports import AddressError, AddressInUse, LinkOptions, Listener, listen

log = logging.getLogger(__name__)

_STOP_SECONDS = 1.5  # without what is to be written to disk, as the next
_END_SECONDS = 3.0  # with all threads, and the goodbye of the announcement


def serve(options: WorkerOptions, *, child: bool = False, shows_stage: bool = True) -> int:
    """Serve coordinators until the process ends, and return the exit code. ``child``: a coordinator on this machine
    started the worker and reads the address from standard output.

    Beyond loopback, links are encrypted and only known coordinators are admitted, unless ``insecure``.

    Raises:
        ConfigError: the worker cannot listen on the address, or cannot be announced.
    """
    host, insecure, disk, store = options.host, options.insecure, options.disk, options.store
    wanted = is_announced(options.announce, host, insecure=insecure, child=child)
    keys = None if insecure else Keyring()  # for links to other workers, also where the own port is open
    is_open = keys is None or is_loopback(host)
    access = AccessControl(None if is_open else keys)
    listener = _listen(Endpoint(host.strip("[]"), 0 if child else options.port), access.options)
    at = Endpoint.parse(listener.address.partition("://")[2])
    address = str(at)
    ending = threading.Event()

    def start_rank(rank: str) -> tuple[str, Callable[[], None]]:
        process = LocalWorker(rank, disk, rank_options(options))
        return process.address(), process.kill

    worker = Worker(
        listener, name=options.name, model=options.model, disk=disk, keys=keys, access=access, store=store,
        ended=ending.set, start_rank=None if child else start_rank,
    )  # fmt: skip
    if child:
        join_group(os.getppid())  # the coordinator divides the memory
        print(json.dumps({"address": address}), flush=True)  # noqa: T201 - the parent reads it
    if keys is not None and not is_open:
        _log_pairing(worker.name, at.port, keys, shows_stage=shows_stage)
    elif not is_loopback(host):
        log.warning("--insecure: any host that reaches %s can use this worker, and read what crosses the link", address)
    log.info("worker %s waits at %s (computing on %s)", worker.name, address, device_name())
    announcing = _announcing(worker.name, host, at.port, access) if wanted else None
    return _stay(worker, ending, announcing, seconds_to_close(disk))


def rank_options(options: WorkerOptions) -> list[str]:
    """Return the options of a process that takes this worker's place as a rank."""
    keeps = ("host", "model", "models_dir", "models_gb", "insecure")
    return words_of(WorkerOptions(**{name: getattr(options, name) for name in keeps}))


def _stay(worker: Worker, ending: threading.Event, announcing: Announcing | None, writing: float) -> int:
    """Return stay until the worker is ``ending`` or ``shutdown`` begins; the exit code. ``writing``: seconds for KV to
    be saved on disk."""
    asked, stopped = threading.Event(), threading.Event()

    def stop() -> None:
        asked.set()
        ending.set()
        stopped.wait()

    with shutdown.closed_by(Closing(stop, _END_SECONDS + writing, stop, _END_SECONDS + writing)):
        try:
            while True:
                if announcing is not None:
                    announcing.tick()
                if ending.wait(timeout=0.5):
                    break
        finally:
            log.info("worker %s stops", worker.name)
            worker.stop(timeout=_STOP_SECONDS + writing)
            if announcing is not None:
                announcing.close()
            stopped.set()
    return 0 if asked.is_set() else 1


def is_announced(asked: bool | None, host: str, *, insecure: bool, child: bool) -> bool:
    """Return whether to announce a worker. ``asked``: the option; ``None`` if it is not given. By default, a worker
    that other machines reach is announced, unless it is ``insecure``: a worker that admits everyone should not be
    offered to everyone.

    Raises:
        ConfigError: announcing was requested, but no other machine reaches the worker.
    """
    if child or (is_loopback(host) and not asked):
        return False
    if is_loopback(host):
        raise ConfigError(f"--announce is for a worker that other machines reach, and {host} is this one; give --host")
    return not insecure if asked is None else asked


def _announcing(name: str, host: str, port: int, access: AccessControl) -> Announcing:
    """Return what announces the worker."""
    security = access.options.security
    announcement = Announcement(
        name=announced_name(name),
        id=new_id(),
        port=port,
        fingerprint="" if security is None else fingerprint_of(security.own.public),
        versions=own_versions(),
        device=device_name(),
        memory=psutil.virtual_memory().total,
    )
    key = short(announcement.fingerprint) if announcement.fingerprint else "none"
    log.info("announced to `splitinfer discover` as %s, key fingerprint %s", announcement.name, key)
    return Announcing(announcement, _numeric(host))


def _numeric(host: str) -> str:
    """Return the number of the interface that was listened on, which may have been given by its name."""
    bare = host.strip("[]")
    try:
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return bare


def _log_pairing(name: str, port: int, keys: Keyring, *, shows_stage: bool) -> None:
    """Log the stage's line for the layout, and which coordinators are admitted."""
    if shows_stage:
        log.info(
            "this worker's stage in the layout: {name: %s, layers: ..., address: %s, key: %s}",
            name, Endpoint(machine_name(), port), keys.own().public,
        )  # fmt: skip
    count = len(keys.known())
    if count == 0:
        log.warning(
            "no coordinator is admitted yet: on the coordinator's machine, `splitinfer pair` prints what to run here"
        )
    else:
        log.info("admitted: %d known %s", count, "key" if count == 1 else "keys")


def _listen(at: Endpoint, options: LinkOptions) -> Listener:
    address = f"rdma://{at.authority}"  # the same port accepts plain TCP links
    try:
        return listen(address, options=options)
    except AddressInUse as error:
        raise ConfigError(f"{at} is in use; is a worker running already? Choose another with --port") from error
    except AddressError as error:
        raise ConfigError(f"{error}; --host is an address of this machine".replace(address, str(at))) from error
