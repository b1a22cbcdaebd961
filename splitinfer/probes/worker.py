"""The way to a worker elsewhere: the connection, the worker's answer, and the link's figures.

A plain TCP connection comes first: what the system says when that fails tells names, ports, routes and permissions
apart, which a link that waits for its peer does not (``engine.links.reachability``).
"""

import errno
import math
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from splitinfer.config import Layout
from splitinfer.core.endpoint import Endpoint
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.versions import own_versions
from splitinfer.keyring import Keyring
from splitinfer.probes.child import Report
from splitinfer.probes.finding import Finding, Reason, failed, passed
from splitinfer.probes.links import LinkSurvey
from transports import Unreachable

_SECONDS = 5.0  # for the name, and for the connection
_TIMEOUT = 8.0  # seconds for the link
SLOW_LATENCY = 2e-3  # seconds one way; Thunderbolt and Ethernet take 0.1 to 0.4, Wi-Fi several milliseconds
SLOW_BANDWIDTH = 60e6  # bytes a second; half of what gigabit Ethernet carries
_START = "start it there: splitinfer worker --host 0.0.0.0"
_CABLE = "connect the machines by Thunderbolt or Ethernet, and give the address of that interface"
_REASONS = {
    errno.ECONNREFUSED: Reason.NOTHING_LISTENS,
    errno.ETIMEDOUT: Reason.TIMEOUT,
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN), Reason.NO_ROUTE),
}


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report the connection, and then the worker and the link."""
    worker = options["worker"]
    unreachable = knock(Endpoint.parse(worker["address"]))
    report(judge_connection(unreachable))
    if unreachable is None:
        report(*judge_link(_link(worker)))


def knock(at: Endpoint) -> Unreachable | None:
    """Connect and hang up; ``None`` if that works."""
    try:
        socket.create_connection((at.host, at.port), timeout=_SECONDS).close()
    except socket.gaierror as error:
        return Unreachable(at.host, error.errno or 0, is_name=True)
    except TimeoutError:
        return Unreachable(at.host, errno.ETIMEDOUT)
    except OSError as error:
        return Unreachable(at.host, error.errno or errno.EINVAL)
    return None


def _link(worker: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's own words about itself, and the link's figures."""
    stages = [{"name": "here", "layers": 6}, {"name": "worker", "layers": 6, **worker}]
    layout = Layout.from_dict({"model": "demo", "stages": stages})
    workers, links = LinkSurvey(layout, Keyring().own, _TIMEOUT, lambda _: None).run()
    seen, link = asdict(workers[0]), asdict(links[0])
    said = seen["welcome"] and {name: seen["welcome"][name] for name in ("device", "free_bytes", "versions")}
    return {
        "problem": link["problem"] or seen["problem"],
        "welcome": said,
        "own_versions": asdict(own_versions()),
        "figures": link["figures"],
    }


def judge_connection(unreachable: Unreachable | None) -> Finding:
    """What ``knock`` came to."""
    if unreachable is None:
        return passed("connection", "the worker's port answers")
    why, error = explain_here(unreachable), unreachable.error
    reason = Reason.NAME if unreachable.is_name else _REASONS.get(error, Reason.NETWORK)
    problem = "name" if unreachable.is_name else errno.errorcode.get(error, "other")
    remedy = _START if unreachable.is_refused else why.remedy or "check cables, addresses and firewalls"
    return failed("connection", reason, why.text, remedy, {"problem": problem})


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
        reason, remedy = Reason.VERSIONS, "install the same versions on both (splitinfer --version)"
    else:
        reason, remedy = Reason.REFUSED if "refuse" in lower else Reason.FAILED, "read the worker's log"
    return failed("worker", reason, problem, remedy)
