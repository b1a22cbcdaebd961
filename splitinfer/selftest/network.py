"""Judges the way to a worker elsewhere: the connection, the worker's answer, and the link's figures. Pure.

What the system says when a connection fails: a name that is not known (getaddrinfo), ECONNREFUSED where a machine
answers and nothing listens, EHOSTUNREACH or ENETUNREACH without a route. On macOS 15 and later EHOSTUNREACH is also
what sockets give a program that may not use the local network: Apple's technote TN3179, "Understanding local network
privacy", has the setting and who is exempt; Apple's developer forums, threads 765285 and 776552, the error.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitinfer.selftest.checks import Check, Fault, Reason, failed, passed
from splitinfer.selftest.outcome import PartOutcome, broken

GROUP = "the way to the worker"
SLOW_LATENCY = 2e-3  # seconds one way; Thunderbolt and Ethernet take 0.1 to 0.4, Wi-Fi several milliseconds
SLOW_BANDWIDTH = 60e6  # bytes a second; half of what gigabit Ethernet carries
_START = "start it there: splitinfer worker --host 0.0.0.0"
_CABLE = "connect the machines by Thunderbolt or Ethernet, and give the address of that interface"
_LOCAL_NETWORK = (
    "allow it in System Settings, Privacy & Security, Local Network, for the application that started this (macOS asks "
    "once; Terminal and ssh need no permission), or look whether both are on one network"
)


def judge_network(outcome: PartOutcome) -> list[Check]:
    """The checks of the way to a worker."""
    system = (outcome.finding("system") or {}).get("system", "")
    connection, link = outcome.found.get("connection"), outcome.finding("link")
    found = [] if connection is None else [_connection(connection["problem"], str(system))]
    if link is not None:
        found += _link(link)
    others = {name: value for name, value in outcome.found.items() if name != "connection"}  # whose problem is judged
    return found + broken(GROUP, replace(outcome, found=others), Fault.WORKER)


def _connection(problem: str | None, system: str) -> Check:
    if problem is None:
        return passed(GROUP, "connection", "the worker's port answers")
    reason, sentence, remedy = _why(problem, is_mac=system == "Darwin")
    return failed(GROUP, "connection", Fault.WORKER, reason, sentence, remedy)


def _why(problem: str, *, is_mac: bool) -> tuple[Reason, str, str]:
    """The reason for a connection's problem (``probes.network.knock``), its sentence, and what to do."""
    if problem == "name":
        return Reason.NAME, "the worker's name is not known here", "Macs are called NAME.local; or give its IP address"
    if problem == "ECONNREFUSED":
        return Reason.NOTHING_LISTENS, "the machine answers, but nothing listens on that port", _START
    if problem in ("EHOSTUNREACH", "ENETUNREACH") and is_mac:
        sentence = f"macOS reports no way to the worker ({problem}), which is also how it refuses the local network"
        return Reason.NO_ROUTE, sentence, _LOCAL_NETWORK
    if problem in ("EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN"):
        return Reason.NO_ROUTE, f"there is no way to the worker's machine ({problem})", "look at cables and addresses"
    if problem in ("timeout", "ETIMEDOUT"):
        remedy = "look whether it sleeps, whether a firewall drops connections, and whether the address is right"
        return Reason.TIMEOUT, "nothing answers at the worker's address", remedy
    return Reason.NETWORK, f"the worker cannot be reached ({problem})", "look at cables, addresses and firewalls"


def _link(link: Mapping[str, Any]) -> list[Check]:
    if link["figures"] is None:
        return [_unusable(str(link["link_problem"] or link["worker_problem"]), refused=bool(link["refused"]))]
    found = [passed(GROUP, "worker", "it answers, has the same versions, and is free")]
    figures = link["figures"]
    latency, down, up = figures["latency_p50"], figures["down"], figures["up"]
    slowest = min((one for one in (down, up) if one is not None), default=None)
    rate = "more than can be measured" if slowest is None else f"{slowest / 1e6:,.0f} MB/s"
    said = f"{1e3 * latency:.2g} ms one way (99 of 100: {1e3 * figures['latency_p99']:.2g}), {rate}"
    if latency > SLOW_LATENCY or (slowest is not None and slowest < SLOW_BANDWIDTH):
        sentence = f"the link is slow: {said}; a cable has under 0.5 ms and over 100 MB/s, Wi-Fi is like this"
        return [*found, failed(GROUP, "link", Fault.SPEED, Reason.SLOW, sentence, _CABLE)]
    return [*found, passed(GROUP, "link", said)]


def _unusable(problem: str, *, refused: bool) -> Check:
    lower = problem.lower()
    if "splitinfer pair" in lower or "is not admitted" in lower:
        reason, remedy = Reason.NOT_ADMITTED, "run there what the sentence says, or splitinfer pair with this Mac's key"
    elif "version" in lower:
        reason, remedy = Reason.VERSIONS, "install the same versions on both (splitinfer version)"
    else:
        reason, remedy = Reason.REFUSED if refused else Reason.FAILED, "read the worker's log"
    return failed(GROUP, "worker", Fault.WORKER, reason, problem, remedy)
