"""The probes of ``splitinfer selftest``, the most important first, and their shares of the time. Pure.

First what could make answers wrong, then what could make them impossible. ``splitinfer doctor`` is one of
them: it judges what the system's commands say, which takes a second, so it also runs by itself (``doctor``).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from splitinfer.core.layout import Layout, lay_out
from splitinfer.probes.finding import Fault, Finding, Outcome

if TYPE_CHECKING:
    from splitinfer.probes.child import Result

USUAL_SECONDS = 180.0  # of a whole run
_TOKENS, _QUICK_TOKENS = 32, 16  # of an answer
MAC, WORKER = "mac", "worker"


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe.

    title: the group of its findings.
    function: "module:function", ".module" in this package; it is called with its options and a ``child.Report``.
    fault: of what crashes, hangs or raises an error in it.
    weight: its share of the time. ``most``: seconds that it gets at most of a run of 180, so that one that hangs leaves
        the others theirs.
    needs: what it says nothing without: a Mac, a link to a worker elsewhere.
    environment: variables of its process; ``{folder}`` is the folder of the run.
    is_quick: whether a quick run has it, too.
    """

    name: str
    title: str
    function: str
    fault: Fault
    weight: float
    most: float = 1e9
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False

    def variables(self, folder: str) -> dict[str, str]:
        return {name: value.format(folder=folder) for name, value in self.environment.items()}

    def own(self, finding: Finding) -> Finding:
        """A finding of this probe, with its group and its fault."""
        is_faulty = finding.outcome is Outcome.FAILED and finding.reason and not finding.fault
        fault = self.fault if is_faulty else finding.fault
        return replace(finding, group=finding.group or self.title, fault=fault)

    def lacking(self, results: "Mapping[str, Result]") -> Finding | None:
        """``None`` if all that it needs is there; else a finding, without a sentence where there is nothing to say."""
        if WORKER in self.needs and ("network" not in results or results["network"].numbers("link") is None):
            return Finding("", Outcome.NOT_AVAILABLE, "")
        if MAC in self.needs and sys.platform != "darwin":
            return Finding("", Outcome.NOT_AVAILABLE, "it needs macOS", group=self.title)
        return None


ABOUT = Probe("about", "this machine", ".machine:about", Fault.DEVICE, 8, 30, is_quick=True)


def selftest_probes(worker: Mapping[str, Any] | None, *, quick: bool = False) -> tuple[Probe, ...]:
    answers = {"tokens": _QUICK_TOKENS if quick else _TOKENS}
    restarts = {**answers, "restarts": True}
    keys = {"XDG_CONFIG_HOME": "{folder}/config"}  # keys are made there, not among the user's
    found = (
        ABOUT,
        _way("one process", "one process", 14, restarts, Fault.DEVICE, is_quick=True),
        _way("tcp", "two processes (tcp)", 16, restarts, is_quick=True),
        *(() if worker is None else _elsewhere(worker, answers)),
        Probe("branches", "this device", ".branches:measure", Fault.DEVICE, 8, 40, is_quick=True),
        _way("inproc", "two stages in one process (inproc)", 9, answers),
        _way("curve", "an encrypted link (curve + tcp)", 9, answers, environment=keys),
        _way("ring", "rdma over MLX's ring", 16, answers),
        Probe("memory", "memory", ".memory:measure", Fault.MEMORY, 7, 30, is_quick=True),
        Probe("doctor", "this machine", ".doctor:measure", Fault.DEVICE, 3, 20, is_quick=True),
    )  # fmt: skip
    return tuple(each for each in found if not quick or each.is_quick)


def _way(
    name: str, title: str, weight: float, options: Mapping[str, Any], fault: Fault = Fault.TRANSPORT, **more: Any
) -> Probe:
    """Tokens by one way through a pipeline."""
    return Probe(name, title, ".tokens:measure", fault, weight, 50, {"way": name, **options}, **more)


def _elsewhere(worker: Mapping[str, Any], answers: Mapping[str, Any]) -> tuple[Probe, ...]:
    options, title = {**answers, "worker": worker}, "the worker elsewhere"
    return (
        Probe("network", "the way to the worker", ".worker:measure", Fault.WORKER, 4, 30, options, is_quick=True),
        _way("worker, tcp", title, 12, options, Fault.WORKER, needs=(WORKER,), is_quick=True),
        _way("worker, rdma", f"{title} over rdma (JACCL)", 12, options, Fault.WORKER, needs=(WORKER, MAC)),
    )


def worker_elsewhere(address: str, key: str | None) -> dict[str, Any]:
    """What a stage of a layout says of a worker at ``--worker``, which has the key of ``--key``.

    Raises:
        ConfigError: one of them is not valid.

    >>> worker_elsewhere("mini.local", None)
    {'address': 'tcp://mini.local:5577'}
    """
    spec = Layout(lay_out([("here", 1, None), ("worker", 1, address, {"key": key})]), name="of --worker").stages[1]
    return {"address": spec.address, **({} if key is None else {"key": key})}
