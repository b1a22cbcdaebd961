"""The probes of ``splitinfer selftest``, the most important first, and their shares of the time. Pure.

First what could make answers wrong, then what could make them impossible. ``splitinfer doctor`` is one of
them: it judges what the system's commands say, which takes a second, so it also runs by itself (``doctor``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from splitinfer.core.layout import Layout, lay_out
from splitinfer.probes.finding import Blame, Finding, Outcome

USUAL_SECONDS = 230.0  # of a whole run
_TOKENS, _QUICK_TOKENS = 32, 16  # of an answer


_FEATURES = {
    "drafts": "drafts in flight",
    "several at once": "many requests at once",
    "a form": "answers in a form",
    "the server": "the server and its page",
    "a lost worker": "a worker that is lost and comes back",
    "kept KV": "KV kept on disk",
    "KV in 8 bits": "KV in 8 bits",
}
"""The feature of a finding by its name, or by what stands behind its last comma."""


@dataclass(frozen=True, slots=True)
class ProbeEntry:
    """A probe.

    title: the feature that its findings are about, but for those in ``_FEATURES``.
    function: "module:function", ".module" in this package; it is called with its options and a ``child.ProbeReport``.
    fault: of what crashes, hangs or raises an error in it.
    weight: its share of the time.
    environment: variables of its process.
    is_quick: whether a quick run has it, too.
    """

    name: str
    title: str
    function: str
    fault: Blame
    weight: float
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False

    def own(self, finding: Finding) -> Finding:
        """Return a finding of this probe, with its group and its fault."""
        group = _FEATURES.get(finding.name.rpartition(", ")[2], self.title)
        is_faulty = finding.outcome is Outcome.FAILED and not finding.fault
        return replace(finding, group=group, fault=self.fault if is_faulty else finding.fault)


ABOUT = ProbeEntry("about", "this machine", ".machine:about", Blame.DEVICE, 8, is_quick=True)


def selftest_probes(worker: Mapping[str, Any] | None, *, quick: bool = False) -> tuple[ProbeEntry, ...]:
    answers = {"tokens": _QUICK_TOKENS if quick else _TOKENS}
    restarts = {**answers, "restarts": True}
    found = (
        ABOUT,
        _way("one process", "a model on this machine", 20, restarts, Blame.DEVICE, is_quick=True),
        _way("tcp", "a model cut in two", 20, restarts, is_quick=True),
        *(() if worker is None else _elsewhere(worker, answers)),
        ProbeEntry("kernels", "the kernels of this device", ".kernels:measure", Blame.DEVICE, 8, is_quick=True),
        _way("inproc", "a model cut in two", 9, answers),
        _way("curve", "encrypted links", 9, answers),
        _way("ring", "rdma, over MLX's ring", 16, answers),
        _way("across", "every layer halved", 9, answers),
        ProbeEntry("memory", "memory", ".memory:measure", Blame.MEMORY, 7, is_quick=True),
        ProbeEntry("doctor", "this machine", ".doctor:measure", Blame.NONE, 3, is_quick=True),
    )
    return tuple(each for each in found if not quick or each.is_quick)


def _way(
    name: str, title: str, weight: float, options: Mapping[str, Any], fault: Blame = Blame.TRANSPORT, **more: Any
) -> ProbeEntry:
    """Return the probe of the tokens by one way through a pipeline."""
    return ProbeEntry(name, title, ".tokens:measure", fault, weight, {"way": name, **options}, **more)


def _elsewhere(worker: Mapping[str, Any], answers: Mapping[str, Any]) -> tuple[ProbeEntry, ...]:
    options, title = {**answers, "worker": worker}, "a worker elsewhere"
    return (
        ProbeEntry("network", title, ".links:measure", Blame.WORKER, 4, options, is_quick=True),
        _way("worker, tcp", title, 12, options, Blame.WORKER, is_quick=True),
        _way("worker, rdma", "rdma to the worker (JACCL)", 12, options, Blame.WORKER),
    )


def worker_elsewhere(address: str, key: str | None) -> dict[str, Any]:
    """Return what a stage of a layout says of a worker at ``--worker``, which has the key of ``--key``.

    Raises:
        ConfigError: one of them is not valid.

    >>> worker_elsewhere("mini.local", None)
    {'address': 'tcp://mini.local:5577'}
    """
    spec = Layout(lay_out([("here", 1, None), ("worker", 1, address, {"key": key})]), name="of --worker").stages[1]
    return {"address": spec.address, **({} if key is None else {"key": key})}
