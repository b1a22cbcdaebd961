"""All checks from what all parts reported. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitinfer.selftest.checks import Check
from splitinfer.selftest.device import judge_branches
from splitinfer.selftest.machine import judge_about, judge_costs, judge_doctor, judge_exact, judge_memory
from splitinfer.selftest.network import judge_network
from splitinfer.selftest.outcome import PartOutcome, patience
from splitinfer.selftest.parts import ROADS, WORKER_ROADS
from splitinfer.selftest.tokens import judge_road


def judge(outcomes: Mapping[str, PartOutcome]) -> list[Check]:
    """The checks, part by part in the order of the run."""
    about, found = about_of(outcomes), list[Check]()
    waits = patience(outcomes["about"].seconds if "about" in outcomes else 0.0)
    for name, outcome in outcomes.items():
        found += _of_part(name, replace(outcome, patience_s=waits), about, has_worker="network" in outcomes)
    return found


def about_of(outcomes: Mapping[str, PartOutcome]) -> Mapping[str, Any]:
    """What this machine is; empty if that part failed."""
    return (outcomes.get("about") or PartOutcome()).finding("about") or {}


def _of_part(name: str, outcome: PartOutcome, about: Mapping[str, Any], *, has_worker: bool) -> list[Check]:
    if name in (*ROADS, *WORKER_ROADS):
        return judge_road(name, outcome, about)
    if name == "doctor":
        return judge_doctor(outcome, about, has_worker=has_worker)
    if name in ("memory", "branches"):
        return (judge_memory if name == "memory" else judge_branches)(outcome, about)
    return {"about": judge_about, "network": judge_network, "costs": judge_costs, "exact": judge_exact}[name](outcome)
