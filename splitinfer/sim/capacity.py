"""The capacity of a machine: the most requests per second that it serves within an objective."""

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.machine.machine import Machine
from splitinfer.sim.simulator import Served, Simulator, config_of
from splitinfer.sim.workload import Arrival

_FIRST_RATE = 1.0  # requests a second
_FAR = 2.0**20
_PRECISION = 0.02


def simulate(
    machine: Machine,
    arrivals: Seq[Arrival],
    *,
    token_budget: int,
    max_running: int,
    policy_config: PolicyConfig,
    kv: KVBudget | None = None,
    acceptance: float | None = None,
    seed: int = 0,
) -> Collection[Served]:
    """Simulate until all requests are served; what they got. ``kv``: the machine's KV memory, ``None`` for enough;
    ``acceptance``: the share of drafts that are right, ``None`` for no drafts."""
    config = config_of(
        machine,
        token_budget=token_budget,
        max_running=max_running,
        max_len=max(one.num_prompt_tokens + one.num_output_tokens for one in arrivals) + 1,
        max_waiting=len(arrivals),
        kv=kv,
        speculates=acceptance is not None,
        policy_config=policy_config,
    )
    costs = CostModel(list(machine.stages), machine.hops[0].fixed + machine.wait, is_known=True)
    simulator = Simulator(Scheduler(config, costs), machine, acceptance=acceptance or 0.0, seed=seed)
    for seq_id, one in enumerate(arrivals, 1):
        params = SamplingParams(max_tokens=one.num_output_tokens)
        simulator.submit(one.at, Sequence(seq_id, [0] * one.num_prompt_tokens, params, 0))
    simulator.run()
    return simulator.served.values()


def decode_gap(machine: Machine, num_decoding: int, context: int) -> float:
    """Seconds between two tokens of each of ``num_decoding`` sequences of ``context`` tokens, without prompts."""
    groups = min(machine.num_stages, num_decoding)
    each = -(-num_decoding // groups)
    shape = Shape.of_single_rows([context] * each)
    times = [stage.at(shape) for stage in machine.stages]
    beside = machine.num_stages * machine.wait
    if machine.launches_ahead:
        beside += machine.host  # the first stage computes another group meanwhile
    else:
        times[0] += machine.host
    hops = sum(hop.seconds(each) for hop in machine.hops) if machine.num_stages > 1 else 0.0
    return max(groups * max(times), beside + sum(times) + hops)


def find_capacity(is_met: Callable[[float], bool]) -> float:
    """The most requests per second at which an objective is met, to a relative ``_PRECISION``; 0 if it never is.

    ``is_met``: whether it is, where requests arrive at a rate. Up to chance it is met below some rate and not above it;
    bisection finds that rate.
    """
    low = high = _FIRST_RATE
    if is_met(low):
        while high < _FAR and is_met(high := 2 * low):
            low = high
    else:
        while low > 1 / _FAR and not is_met(low := high / 2):
            high = low
        if low <= 1 / _FAR:
            return 0.0
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def cuts(machine: Machine) -> Iterator[Machine]:
    """The machine with every number of layers on its first stage; the others share the rest in the same proportions."""
    total, rest = sum(machine.layers), machine.layers[1:]
    if not rest:
        yield machine
        return
    for count in range(1, total - len(rest) + 1):
        left, given = total - count, list[int]()
        for i, layers in enumerate(rest):
            most = left - sum(given) - (len(rest) - i - 1)
            given.append(most if i == len(rest) - 1 else min(most, max(1, round(left * layers / sum(rest)))))
        yield machine.cut_into([count, *given])
