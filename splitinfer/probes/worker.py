"""The way to a worker elsewhere: the connection, the worker's answer, and the link's figures.

A plain TCP connection comes first: what the system says when that fails tells names, ports, routes and permissions
apart, which a link that waits for its peer does not. A name that is not known fails in getaddrinfo; ECONNREFUSED comes
where a machine answers and nothing listens, EHOSTUNREACH or ENETUNREACH without a route. On macOS 15 and later
EHOSTUNREACH is also what sockets give a program that may not use the local network: Apple's technote TN3179,
"Understanding local network privacy", has the setting and who is exempt; Apple's developer forums, threads 765285 and
776552, the error.
"""

import errno
import math
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from splitinfer.config import Layout
from splitinfer.engine.versions import own_versions
from splitinfer.keyring import Keyring
from splitinfer.probes.child import Report
from splitinfer.probes.finding import Finding, Reason, failed, passed
from splitinfer.probes.links import LinkSurvey
from splitinfer.probes.registry import WorkerAddress
from transports.emulated import installed

_SECONDS = 5.0  # for the name, and for the connection
_TIMEOUT = 8.0  # seconds for the link
SLOW_LATENCY = 2e-3  # seconds one way; Thunderbolt and Ethernet take 0.1 to 0.4, Wi-Fi several milliseconds
SLOW_BANDWIDTH = 60e6  # bytes a second; half of what gigabit Ethernet carries
_START = "start it there: splitinfer worker --host 0.0.0.0"
_CABLE = "connect the machines by Thunderbolt or Ethernet, and give the address of that interface"
_LOCAL_NETWORK = (
    "allow it in System Settings, Privacy & Security, Local Network, for the application that started this (macOS asks "
    "once; Terminal and ssh need no permission), or look whether both are on one network"
)


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report the connection, and then the worker and the link."""
    worker = WorkerAddress(**options["worker"])
    problem = knock(worker.host, worker.port)
    report(judge_connection(problem, is_mac=platform.system() == "Darwin"))
    if problem is None:
        report(*judge_link(_link(worker)))


def knock(
    host: str, port: int, connect: Callable[..., socket.socket] = socket.create_connection, seconds: float = _SECONDS
) -> str | None:
    """Connect and hang up: ``None`` if that works, or "name", "timeout", or the name of an errno (ECONNREFUSED)."""
    try:
        connect((host, port), timeout=seconds).close()
    except socket.gaierror:
        return "name"
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "other")
    return None


def _link(worker: WorkerAddress) -> dict[str, Any]:
    """The worker's own words about itself, and the link's figures."""
    stages = [{"name": "here", "layers": 6}, {"name": "worker", "layers": 6, **worker.stage}]
    with ExitStack() as stack:
        if worker.link is not None:
            stack.enter_context(installed(worker.link))
        layout = Layout.from_dict({"model": "demo", "stages": stages})
        result = stack.enter_context(LinkSurvey(layout, Keyring().own, _TIMEOUT, lambda _: None)).run()
    seen, link = asdict(result.workers[0]), asdict(result.links[0])
    said = seen["welcome"] and {name: seen["welcome"][name] for name in ("device", "free_bytes", "versions")}
    return {
        "problem": link["problem"] or seen["problem"],
        "welcome": said,
        "own_versions": asdict(own_versions()),
        "clock": seen["clock"],
        "figures": link["figures"],
    }


_NO_ROUTE = (Reason.NO_ROUTE, "there is no route to the worker's machine", "look at cables and addresses")
_SILENT = (
    Reason.TIMEOUT,
    "nothing answers at the worker's address",
    "look whether it sleeps, whether a firewall drops connections, and whether the address is right",
)
_PROBLEMS = {
    "name": (
        Reason.NAME, "this machine does not know the worker's name",
        "Macs are called NAME.local; or give its IP address",
    ),
    "ECONNREFUSED": (Reason.NOTHING_LISTENS, "the machine answers, but nothing listens on that port", _START),
    "timeout": _SILENT, "ETIMEDOUT": _SILENT,
    "EHOSTUNREACH": _NO_ROUTE, "ENETUNREACH": _NO_ROUTE, "ENETDOWN": _NO_ROUTE, "EHOSTDOWN": _NO_ROUTE,
}  # fmt: skip
_OTHER = (Reason.NETWORK, "the worker cannot be reached", "look at cables, addresses and firewalls")


def judge_connection(problem: str | None, *, is_mac: bool) -> Finding:
    """What ``knock`` came to."""
    if problem is None:
        return passed("connection", "the worker's port answers")
    reason, sentence, remedy = _PROBLEMS.get(problem, _OTHER)
    if is_mac and problem in ("EHOSTUNREACH", "ENETUNREACH"):
        sentence = "macOS reports no route to the worker, which is also how it refuses the local network"
        remedy = _LOCAL_NETWORK
    said = f"{sentence} ({problem})" if problem.isupper() else sentence
    return failed("connection", reason, said, remedy, {"problem": problem})


def judge_link(link: Mapping[str, Any]) -> list[Finding]:
    """The worker's answer, and whether the link is slow."""
    if link["figures"] is None:
        return [_unusable(str(link["problem"]))]
    found, figures = [passed("worker", "it answers, has the same versions, and is free")], link["figures"]
    latency, rates = figures["latency_p50"], [figures["down"], figures["up"]]
    slowest = min((one for one in rates if one is not None and math.isfinite(one)), default=None)
    rate = "more than can be measured" if slowest is None else f"{slowest / 1e6:,.0f} MB/s"
    said = f"{1e3 * latency:.2g} ms one way (99 of 100: {1e3 * figures['latency_p99']:.2g}), {rate}"
    if latency > SLOW_LATENCY or (slowest is not None and slowest < SLOW_BANDWIDTH):
        sentence = f"the link is slow: {said}; a cable has under 0.5 ms and over 100 MB/s, Wi-Fi is like this"
        return [*found, failed("link", Reason.SLOW, sentence, _CABLE, link)]
    return [*found, passed("link", said, link)]


def _unusable(problem: str) -> Finding:
    lower = problem.lower()
    if "splitinfer pair" in lower or "is not admitted" in lower:
        reason, remedy = Reason.NOT_ADMITTED, "run there what the sentence says, or splitinfer pair with this Mac's key"
    elif "version" in lower:
        reason, remedy = Reason.VERSIONS, "install the same versions on both (splitinfer version)"
    else:
        reason, remedy = Reason.REFUSED if "refuse" in lower else Reason.FAILED, "read the worker's log"
    return failed("worker", reason, problem, remedy)
