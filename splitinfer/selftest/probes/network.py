"""Whether a worker elsewhere can be reached, by the simplest way there is, and what the link to it carries.

A plain TCP connection comes first: what the system says when that fails tells names, ports, routes and permissions
apart, which a link that waits for its peer does not.
"""

import errno
import platform
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from splitinfer.config import Layout
from splitinfer.doctor.links import LinkSurvey
from splitinfer.engine.versions import own_versions
from splitinfer.jobs.process import Report
from splitinfer.keyring import Keyring
from splitinfer.selftest.address import WorkerAddress
from transports.emulated.process_wide import installed

_SECONDS = 5.0  # for the name, and for the connection
_TIMEOUT = 8.0  # seconds for the link


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report the connection, and then the link."""
    worker = WorkerAddress(**options["worker"])
    report("system", {"system": platform.system()})
    reached = knock(worker.host, worker.port)
    report("connection", reached)
    if reached["problem"] is None:
        report.guarded("link", partial(_link, worker))


def knock(
    host: str, port: int, connect: Callable[..., socket.socket] = socket.create_connection, seconds: float = _SECONDS
) -> dict[str, Any]:
    """Connect and hang up: ``problem`` is ``None``, or "name", "timeout", or the name of an errno (ECONNREFUSED)."""
    began = time.monotonic()
    try:
        connect((host, port), timeout=seconds).close()
    except socket.gaierror:
        problem: str | None = "name"
    except TimeoutError:
        problem = "timeout"
    except OSError as error:
        problem = errno.errorcode.get(error.errno or 0, "other")
    else:
        problem = None
    return {"problem": problem, "seconds": time.monotonic() - began}


def _link(worker: WorkerAddress) -> dict[str, Any]:
    """The worker's own words about itself, and the link's figures."""
    stage = {"name": "worker", "layers": 6, "address": worker.address}
    given = {} if worker.key is None else {"key": worker.key}
    layout = Layout.from_dict({"model": "demo", "stages": [{"name": "here", "layers": 6}, {**stage, **given}]})
    with ExitStack() as stack:
        if worker.link is not None:
            stack.enter_context(installed(worker.link))
        survey = stack.enter_context(LinkSurvey(layout, Keyring().own, _TIMEOUT, lambda _: None))
        result = survey.run()
    seen, link = result.workers[0], result.links[0]
    return {
        "worker_problem": seen.problem,
        "link_problem": link.problem,
        "welcome": None if seen.welcome is None else _plain(seen.welcome),
        "own_versions": asdict(own_versions()),
        "clock": None if seen.clock is None else asdict(seen.clock),
        "figures": None if link.figures is None else asdict(link.figures),
        "refused": "refuse" in f"{seen.problem} {link.problem}",
    }


def _plain(welcome: Any) -> dict[str, Any]:
    return {
        "device": welcome.device,
        "free_bytes": welcome.free_bytes,
        "versions": asdict(welcome.versions) if hasattr(welcome, "versions") else None,
    }
