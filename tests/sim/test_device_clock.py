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
from tests.emulation.files import read_machine
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator

TWO_LARGE, TWO_SMALL, THREE_LARGE = (read_machine(Path(name)) for name in ("two-large", "two-small", "three-large"))
EXAMPLES = {"two-large": TWO_LARGE, "two-small": TWO_SMALL, "three-large": THREE_LARGE}


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_after_a_long_prompt_the_gaps_are_at_once_the_steady_ones(name: str):
    machine = EXAMPLES[name]
    one_row = sum(stage.at(Shape(1)) + hop.fixed for stage, hop in zip(machine.stages, machine.hops, strict=True))
    times = run(machine, [(0.0, 8 * 512, 40)]).served[0].token_times
    assert gaps(times) == pytest.approx([one_row + machine.host] * 39)
    chunks = 8 * max(stage.at(Shape(512)) for stage in machine.stages)
    rest = sum(stage.at(Shape(512)) for stage in machine.stages) - max(s.at(Shape(512)) for s in machine.stages)
    assert times[0] == pytest.approx(chunks + rest, rel=0.01), "chunks of one prompt follow each other at once"


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
