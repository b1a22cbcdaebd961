"""Running a worker process: listen, say where, and end on Ctrl-C, SIGTERM or a parent's death.

The main thread stays in Python and only waits, so that signals are heard while the engine computes.
"""

import json
import logging
import sys
import threading

from splitinfer.engine.versions import device_name
from splitinfer.engine.worker import Worker
from splitinfer.errors import ConfigError
from splitinfer.kvstore.store import Disk
from transports import AddressError, AddressInUse, Listener, listen

log = logging.getLogger(__name__)

_STOP_SECONDS = 1.5


def serve(host: str, port: int, *, name: str | None, model: str | None, child: bool, disk: Disk | None) -> int:
    """Serve coordinators until told to stop; the process's exit code.

    ``child``: started by a coordinator on this machine, which reads the address from standard output and
    whose end closes standard input. ``disk``: where KV is kept for coordinators that want it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = _listen(f"tcp://{_bracketed(host)}:{port}")
    worker = Worker(listener, name=name, model=model, disk=disk)
    ended = threading.Event()
    if child:
        print(json.dumps({"address": listener.address}), flush=True)  # noqa: T201 - the parent reads it
        threading.Thread(target=_wait_for_parent, args=(ended,), daemon=True).start()
    log.info("worker %s waits at %s (computing on %s)", worker.name, listener.address, device_name())
    try:
        while not ended.wait(timeout=0.5):
            if not worker.is_alive:
                return 1
    finally:
        log.info("worker %s stops", worker.name)
        worker.stop(timeout=_STOP_SECONDS)
    return 0


def _listen(address: str) -> Listener:
    try:
        return listen(address)
    except AddressInUse as error:
        raise ConfigError(f"{address} is in use; is a worker running already? Choose another with --port") from error
    except AddressError as error:
        raise ConfigError(str(error)) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _wait_for_parent(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()
