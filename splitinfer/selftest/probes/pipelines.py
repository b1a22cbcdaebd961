"""The pipelines of the roads: the demo model whole, or cut over a worker that is reached in some way."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from splitinfer.core.layout import LOCAL
from splitinfer.core.link_transport import JACCL, RDMA, RING
from splitinfer.engine.worker.access import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings
from splitinfer.selftest.address import WorkerAddress
from transports import LinkOptions, listen
from transports.emulated.process_wide import installed

DEMO_LAYERS = 12
_LAYERS = (5, 7)  # here, and on the worker
_STOP_SECONDS = 2.0


@contextmanager
def worker_stage(options: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The second stage of a road's layout, its worker running; ``None`` if there is one stage only.

    ``options``: ``road``, and for a worker elsewhere ``worker``.
    """
    road = options["road"]
    with ExitStack() as stack:
        if road == "one process":
            yield None
        elif road == "inproc":
            yield {"address": stack.enter_context(_worker_here("inproc://selftest"))}
        elif road == "tcp":
            yield {"address": LOCAL}
        elif road == "ring":
            yield {"address": LOCAL, "transport": RDMA, "backend": RING}
        elif road == "curve":
            yield stack.enter_context(_keyed_worker(Path(options["folder"])))
        else:
            worker = WorkerAddress(**options["worker"])
            if worker.link is not None:
                stack.enter_context(installed(worker.link))
            given = {} if worker.key is None else {"key": worker.key}
            rdma = {"transport": RDMA, "backend": JACCL} if road == "worker, rdma" else {}
            yield {"address": worker.address, **given, **rdma}


@contextmanager
def pipeline(second: Mapping[str, Any] | None, **settings: Any) -> Iterator[LLM]:
    """The demo model over one stage or two."""
    stages: list[dict[str, Any]] = [{"name": "first", "layers": DEMO_LAYERS}]
    if second is not None:
        stages = [{"name": "first", "layers": _LAYERS[0]}, {"name": "second", "layers": _LAYERS[1], **second}]
    limits = Settings(context=1024, connect_timeout=8.0, rejoin_timeout=0.0, **settings)
    with LLM({"model": "demo", "stages": stages}, settings=limits) as llm:
        yield llm


@contextmanager
def _worker_here(address: str, options: LinkOptions | None = None, **more: Any) -> Iterator[str]:
    """A worker on threads of this process; where it listens."""
    listener = listen(address, options=options or LinkOptions())
    worker = Worker(listener, **more)
    try:
        yield listener.address
    finally:
        worker.stop(timeout=_STOP_SECONDS)


@contextmanager
def _keyed_worker(folder: Path) -> Iterator[dict[str, Any]]:
    """A worker on loopback with keys of its own, which admits this process's."""
    keys = Keyring(folder / "worker")
    keys.admit(Keyring().own().public, "selftest")
    access = AccessControl(keys)
    with _worker_here("tcp://127.0.0.1:0", access.options, keys=keys, access=access) as address:
        yield {"address": address, "key": keys.own().public}
