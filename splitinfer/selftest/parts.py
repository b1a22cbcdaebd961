"""The parts, most important first, and their shares of the time. Pure.

First what could make answers wrong, then what could make them impossible, then figures. What a part leaves of its time
goes to those behind it; so does what a machine without a worker, or without a GPU, has no use for.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from splitinfer.jobs.job import Job
from splitinfer.selftest.address import WorkerAddress
from splitinfer.selftest.outcome import PartOutcome

HERE = "splitinfer.selftest.probes"
ROADS = ("one process", "tcp", "inproc", "curve", "ring")  # through pipelines on this machine
WORKER_ROADS = ("worker, tcp", "worker, rdma")
USUAL_SECONDS = 180.0  # of a whole run
_RESTARTS = ("one process", "tcp")
_TOKENS, _QUICK_TOKENS = 32, 16  # of an answer
_QUICK = ("about", "one process", "tcp", "network", "worker, tcp", "branches", "memory", "doctor")
_EXACT_WORDS = ("--trials", "1", "--prompt-tokens", "40", "--decode-tokens", "8")


@dataclass(frozen=True, slots=True)
class Part:
    """weight: its share of the time. most: seconds of the usual ``USUAL_SECONDS`` that it gets at most, so that one
    that hangs leaves the others theirs."""

    name: str
    module: str
    weight: float
    most: float
    options: Mapping[str, Any] = field(default_factory=dict)
    own_keys: bool = False  # makes keys, which must not be the user's

    def most_of(self, seconds: float) -> float:
        """The most that it gets of a run of so many seconds."""
        return self.most * max(1.0, seconds / USUAL_SECONDS)

    def job(self, folder: str) -> Job:
        """Its process. ``folder``: where it may write."""
        environment = {"XDG_CONFIG_HOME": f"{folder}/config"} if self.own_keys else {}
        return Job(self.name, self.module, {**self.options, "folder": folder}, environment)


def parts(worker: WorkerAddress | None, *, quick: bool = False) -> tuple[Part, ...]:
    """The parts of a run, in order."""
    tokens = _QUICK_TOKENS if quick else _TOKENS
    found = [
        Part("about", f"{HERE}.about", 8, 30),
        *(_road(road, tokens) for road in ROADS[:2]),
        *(_elsewhere(worker, tokens) if worker is not None else ()),
        Part("branches", f"{HERE}.branches", 8, 40),
        *(_road(road, tokens) for road in ROADS[2:]),
        Part("memory", f"{HERE}.memory", 7, 30),
        Part("doctor", f"{HERE}.doctor", 3, 20),
        Part("costs", f"{HERE}.costs", 6, 30),
        Part("exact", "splitinfer.bench.gpu.commands", 10, 30, {"mode": "exact", "words": _EXACT_WORDS}),
    ]
    return tuple(part for part in found if not quick or part.name in _QUICK)


def is_worth_it(name: str, outcomes: Mapping[str, PartOutcome]) -> bool:
    """Whether a part can say anything, after what those before it found: no tokens come from a worker that cannot be
    reached."""
    if name not in WORKER_ROADS:
        return True
    link = outcomes.get("network", PartOutcome()).finding("link")
    return link is not None and link["figures"] is not None


def _road(road: str, tokens: int) -> Part:
    options = {"road": road, "tokens": tokens, "restarts": road in _RESTARTS}
    weight = {"one process": 14.0, "tcp": 16.0, "ring": 16.0}.get(road, 9.0)
    return Part(road, f"{HERE}.roads", weight, 50, options, own_keys=road == "curve")


def _elsewhere(worker: WorkerAddress, tokens: int) -> list[Part]:
    given = asdict(worker)
    common = {"tokens": tokens, "restarts": False, "worker": given}
    return [
        Part("network", f"{HERE}.network", 4, 30, {"worker": given}),
        *(Part(road, f"{HERE}.roads", 12, 45, {"road": road, **common}) for road in WORKER_ROADS),
    ]
