"""The search of ``splitinfer simulate``: a machine's figures over policies, token budgets, cuts and rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions
from splitinfer.machine.machine import Machine
from splitinfer.sim.capacity import cuts, decode_gap, find_capacity, simulate
from splitinfer.sim.outcome import Outcome, outcome_of
from splitinfer.sim.workload import Arrival, Lengths, poisson, recorded

DELAY = 50.0  # times the usual gap: the median delay, at most, at capacity


@dataclass(frozen=True, slots=True)
class Search:
    """What to simulate.

    rates: requests per second.
    objectives: bounds of the time between tokens, in multiples of the usual gap, for which to find the capacity.
    all_cuts: whether to try all cuts, and not only the machine's own.
    kv_tokens: tokens of KV that fit; ``None``: enough.
    acceptance: share of drafts that are right; ``None``: no drafts.
    """

    machine: Machine
    lengths: tuple[Lengths, ...]
    serving_options: ServingOptions
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    requests: int
    seed: int
    rates: tuple[float, ...] = ()
    objectives: tuple[float, ...] = ()
    all_cuts: bool = False
    kv_tokens: int | None = None
    acceptance: float | None = None

    @property
    def max_running(self) -> int:
        """The most requests that share the stages."""
        return self.serving_options.max_running or MAX_RUNNING

    def gap(self, machine: Machine) -> float:
        """The usual gap between two tokens in seconds, without prompts: as many sequences as may run decode at half of
        their answers."""
        usual = median(one.num_prompt_tokens + one.num_output_tokens / 2 for one in self.lengths)
        return decode_gap(machine, self.max_running, round(usual))


def search(asked: Search) -> dict[str, Any]:
    """Simulate every combination; returns plain numbers."""
    machines = list(cuts(asked.machine)) if asked.all_cuts else [asked.machine]
    cases = [
        _case(asked, machine, policy, budget)
        for machine, policy, budget in product(machines, asked.policies, asked.budgets)
    ]
    return {
        "requests": asked.requests,
        "max_running": asked.max_running,
        "mean_prompt_tokens": sum(one.num_prompt_tokens for one in asked.lengths) / len(asked.lengths),
        "mean_answer_tokens": sum(one.num_output_tokens for one in asked.lengths) / len(asked.lengths),
        "gap": asked.gap(asked.machine),
        "cases": cases,
    }


def _case(asked: Search, machine: Machine, policy: str, budget: int) -> dict[str, Any]:
    gap = asked.gap(asked.machine)
    found: dict[str, Any] = {"cut": machine.cut, "policy": policy, "token_budget": budget, "rates": [], "capacity": []}
    for arrivals, rate in _arrivals(asked):
        result = _run(asked, machine, policy, budget, arrivals, None)
        found["rates"].append({"rate": rate, **result.as_dict()})
    for times in asked.objectives:
        found["capacity"].append({"objective": times, **_capacity(asked, machine, policy, budget, times * gap, gap)})
    return found


def _arrivals(asked: Search) -> Sequence[tuple[tuple[Arrival, ...], float | None]]:
    if asked.rates:
        return [(poisson(asked.lengths, asked.requests, rate, asked.seed), rate) for rate in asked.rates]
    return [] if asked.objectives else [(recorded(asked.lengths, asked.requests), None)]


def _capacity(asked: Search, machine: Machine, policy: str, budget: int, itl: float, gap: float) -> dict[str, Any]:
    """The capacity within the latency that users accept: ``itl`` seconds between tokens at the 99th percentile, and a
    median delay of ``DELAY`` gaps until the first slice is planned (a longer one shows that the queue grows). Defined
    as in Sarathi-Serve (arXiv 2403.02310)."""

    def run(rate: float) -> Outcome:
        arrivals = poisson(asked.lengths, asked.requests, rate, asked.seed)
        return _run(asked, machine, policy, budget, arrivals, itl)

    def is_met(rate: float) -> bool:
        found = run(rate)
        return found.itl.p99 <= itl and found.delay.p50 <= DELAY * gap

    rate = find_capacity(is_met)
    return {"rate": rate, **(run(rate).as_dict() if rate else {})}


def _run(
    asked: Search, machine: Machine, policy: str, budget: int, arrivals: Sequence[Arrival], itl: float | None
) -> Outcome:
    """One run. An objective is passed to stall_free as its itl_slo_ms, as a user would set it."""
    serving_options = ServingOptions(policy=policy).over(asked.serving_options)
    if itl is not None and policy == "stall_free" and serving_options.itl_slo_ms is None:
        serving_options = ServingOptions(itl_slo_ms=1000 * itl).over(serving_options)
    kv = None if asked.kv_tokens is None else KVBudget((StageKV(asked.kv_tokens, 1),) * machine.num_stages)
    served = simulate(
        machine,
        arrivals,
        token_budget=budget,
        max_running=asked.max_running,
        policy_config=serving_options.policy_config,
        kv=kv,
        acceptance=asked.acceptance,
        seed=asked.seed,
    )
    return outcome_of(served, itl)
