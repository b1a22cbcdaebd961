"""Runs a worker process: listens, prints its address, serves coordinators, and stops when the process is to end."""

import ipaddress
import json
import logging
import os
import threading

from splitinfer.engine.versions import device_name, machine_name
from splitinfer.engine.worker.access import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring
from splitinfer.kvstore.store import Disk, seconds_to_close
from splitinfer.shutdown import Closing, Shutdown
from splitinfer.store.models import ModelStore
from splitinfer.system.ledger import join_group
from transports import AddressError, AddressInUse, LinkOptions, Listener, listen

log = logging.getLogger(__name__)

_STOP_SECONDS = 1.5
_END_SECONDS = 2 * _STOP_SECONDS  # with all threads; both without what is to be written to disk


def serve(
    host: str,
    port: int,
    shutdown: Shutdown,
    *,
    name: str | None,
    model: str | None,
    child: bool,
    disk: Disk | None,
    insecure: bool = False,
    store: ModelStore | None = None,
) -> int:
    """Serve coordinators until ``shutdown`` begins, and return the process's exit code.

    Beyond loopback, links are encrypted and only known coordinators are admitted, unless ``insecure``.

    ``child``: started by a coordinator on this machine, which reads the address from standard output.
    ``disk``: the KV store for coordinators that use one. ``store``: where weights are kept that are copied from others.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    keys = None if insecure else Keyring()  # for links to other workers, also where the own port is open
    is_open = keys is None or _is_loopback(host)
    access = AccessControl(None if is_open else keys)
    listener = _listen(f"rdma://{_bracketed(host)}:{port}", access.options)  # the same port accepts plain TCP links
    address = "tcp://" + listener.address.partition("://")[2]
    ending, asked, stopped = threading.Event(), threading.Event(), threading.Event()
    worker = Worker(
        listener, name=name, model=model, disk=disk, keys=keys, access=access, store=store, ended=ending.set
    )
    if child:
        join_group(os.getppid())  # the coordinator divides the memory
        print(json.dumps({"address": address}), flush=True)  # noqa: T201 - the parent reads it
    if keys is not None and not is_open:
        _log_pairing(worker.name, address, keys)
    elif not _is_loopback(host):
        log.warning("--insecure: any host that reaches %s can use this worker, and read what crosses the link", address)
    log.info("worker %s waits at %s (computing on %s)", worker.name, address, device_name())

    def stop() -> None:
        asked.set()
        ending.set()
        stopped.wait()

    writing = seconds_to_close(disk)
    with shutdown.closed_by(Closing(stop, _END_SECONDS + writing, stop, _END_SECONDS + writing)):
        try:
            while not ending.wait(timeout=0.5):
                pass
        finally:
            log.info("worker %s stops", worker.name)
            worker.stop(timeout=_STOP_SECONDS + writing)
            stopped.set()
    return 0 if asked.is_set() else 1


def _log_pairing(name: str, address: str, keys: Keyring) -> None:
    """Log the stage's line for the layout, and which coordinators are admitted."""
    port = address.rpartition(":")[2]
    log.info(
        "this worker's stage in the layout: {name: %s, layers: ..., address: tcp://%s:%s, key: %s}",
        name, machine_name(), port, keys.own().public,
    )  # fmt: skip
    count = len(keys.known())
    if count == 0:
        log.warning(
            "no coordinator is admitted yet: on the coordinator's machine, `splitinfer pair` prints what to run here"
        )
    else:
        log.info("admitted: %d known %s", count, "key" if count == 1 else "keys")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _listen(address: str, options: LinkOptions) -> Listener:
    try:
        return listen(address, options=options)
    except AddressInUse as error:
        raise ConfigError(
            f"{address.replace('rdma', 'tcp', 1)} is in use; is a worker running already? Choose another with --port"
        ) from error
    except AddressError as error:
        raise ConfigError(str(error)) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
