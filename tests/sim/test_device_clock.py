"""Virtual time on devices that compute while their hosts go on: nothing but the devices and the links takes time."""

from itertools import pairwise
from pathlib import Path

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.flight import Flight
from splitinfer.machine.costs import Costs
from tests.emulation.device_queue import DeviceTraits
from tests.emulation.files import read_machine
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator

TWO_LARGE, TWO_SMALL, THREE_LARGE = (read_machine(Path(name)) for name in ("two-large", "two-small", "three-large"))
EXAMPLES = {"two-large": TWO_LARGE, "two-small": TWO_SMALL, "three-large": THREE_LARGE}
LARGE_HOPS = sum(hop.fixed for hop in TWO_LARGE.hops)


def one_stage(buffers: int = 1, **more: object) -> Machine:
    return Machine((Costs.line(0.01, 0.0),), (Hop(),), (8,), launches_ahead=True, buffers=(buffers,), **more)  # type: ignore[arg-type]


def run(machine: Machine, requests: list[tuple[float, int, int]], **more: object) -> Simulator:
    """Serves requests of (time, prompt tokens, answer tokens)."""
    flight, acceptance = more.pop("flight", None), float(str(more.pop("acceptance", 0.0)))
    stages = machine.num_stages
    limits = {"token_budget": 512, "max_running": 64, "max_len": 100_000, "speculates": flight is not None, **more}
    config = SchedulerConfig(stages, stages + 1, num_stages=stages, **limits)  # type: ignore[arg-type]
    clockwork = Simulator(Scheduler(config), machine, check=True, acceptance=acceptance)
    for seq_id, (at, prompt, answer) in enumerate(requests):
        params = SamplingParams(max_tokens=answer)
        clockwork.submit(at, Sequence(seq_id, [seq_id] * prompt, params, 0, flight=flight))  # type: ignore[arg-type]
    clockwork.run()
    return clockwork


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


# -- nothing but the devices takes time ------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_after_a_long_prompt_the_gaps_are_at_once_the_steady_ones(name: str):
    machine = EXAMPLES[name]
    one_row = sum(stage.at(Shape(1)) + hop.fixed for stage, hop in zip(machine.stages, machine.hops, strict=True))
    times = run(machine, [(0.0, 8 * 512, 40)]).served[0].token_times
    assert gaps(times) == pytest.approx([one_row + machine.host] * 39)
    chunks = 8 * max(stage.at(Shape(512)) for stage in machine.stages)
    rest = sum(stage.at(Shape(512)) for stage in machine.stages) - max(s.at(Shape(512)) for s in machine.stages)
    assert times[0] == pytest.approx(chunks + rest, rel=0.01), "chunks of one prompt follow each other at once"


# -- the queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffers", "heard"), [(100, 0.009), (20, 0.005), (10, 0.002), (1, 0.002)])
def test_a_launch_holds_the_coordinator_until_few_buffers_are_left(buffers: int, heard: float):
    """Of a step of 10 ms; a message comes after 2 ms."""
    config = SchedulerConfig(1, 2, 512, 64, 10_000)
    clockwork, times = Simulator(Scheduler(config), one_stage(buffers)), list[float]()
    clockwork.submit(0.0, Sequence(0, [0] * 8, SamplingParams(max_tokens=1), 0))
    clockwork.at(0.002, lambda: times.append(clockwork.now))
    clockwork.run()
    assert times == pytest.approx([heard])
    assert clockwork.served[0].token_times == pytest.approx([0.01])


def test_a_result_leaves_while_the_coordinator_is_held_in_a_launch():
    """Two chunks on two stages: the first leaves at 10 ms, though the second's launch holds until 19 ms."""
    stages = (Costs.line(0.01, 0.0),) * 2
    machine = Machine(stages, (Hop(0.001),) * 2, (1, 1), launches_ahead=True, buffers=(100, 100))
    clockwork = run(machine, [(0.0, 1024, 1)])
    found = [(start, end) for start, end, rows in clockwork.busy[1] if rows]
    assert found == [pytest.approx((0.011, 0.021)), pytest.approx((0.021, 0.031))]


def test_who_waits_for_a_step_goes_on_later():
    machine = Machine(TWO_LARGE.stages, TWO_LARGE.hops, (1, 1), launches_ahead=True, device=DeviceTraits(wait=0.002))
    assert gaps(run(machine, [(0.0, 8, 20)]).served[0].token_times) == pytest.approx([0.078 + LARGE_HOPS + 0.004] * 19)


def test_the_clock_of_a_device_that_was_idle_is_lower():
    slow = one_stage(device=DeviceTraits(idle_after=1.0, idle_factor=5.0))
    clockwork = run(slow, [(0.0, 8, 3), (2.0, 8, 3)])
    assert clockwork.served[0].token_times == pytest.approx([0.01, 0.02, 0.03])
    assert clockwork.served[1].token_times == pytest.approx([2.05, 2.06, 2.07])


# -- drafts ------------------------------------------------------------------------------------------------------


def test_a_block_of_drafts_that_became_void_on_the_first_stage_is_not_sent():
    """Each draft is wrong. A block's verdict comes after 15 ms, while the one behind it is computed, from 12 to 22."""
    stages = (Costs.line(0.01, 0.0), Costs.line(0.005, 0.0))
    machine = Machine(stages, (Hop(),) * 2, (8, 8), draft=0.002, launches_ahead=True)
    clockwork = run(machine, [(0.0, 8, 20)], flight=Flight(first=1, further=1, in_flight=2))
    assert clockwork.scheduler.speculation is not None
    counts = clockwork.scheduler.speculation.counts
    assert counts.unsent > 5
    assert counts.rejected == 0
    assert sum(rows == 1 for _, _, rows in clockwork.busy[0]) >= counts.unsent
    alone = sum(rows == 1 for _, _, rows in clockwork.busy[1])
    assert alone <= 1, "the last token has no draft; of a void block only the plan comes"
