"""Virtual time: what the simulated pipeline does is what the formulas say."""

from pathlib import Path

import pytest

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.chooser import Member, expected
from splitinfer.core.speculation.flight import Flight
from splitinfer.machine.costs import Costs
from tests.core.given_costs import GivenCosts, GivenStage, line
from tests.emulation.files import read_machine
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_drafts_give_what_the_sum_over_verdicts_says(*, launches_ahead: bool):
    """Another way to the same number: the scheduler's plans on a clock, against ``core.speculation.chooser``'s
    formula. Where devices launch ahead, drafts stand in line behind the first stage's step, so its time is divided in
    the same way; what the coordinator hears while it waits for a draft, it takes in behind that draft."""
    costs, buffers = Costs.line(0.01, 0.0), (88 if launches_ahead else 1,) * 2
    hops = (Hop(0.0005),) * 2
    rig = Machine((costs,) * 2, hops, (8,) * 2, draft=0.001, launches_ahead=launches_ahead, buffers=buffers)
    config = SchedulerConfig(2, 3, 512, 64, 10_000, speculates=True, num_stages=2, fixed_groups=True)
    simulator = Simulator(Scheduler(config), rig, acceptance=0.6, check=True)
    flight = Flight(first=3, further=3, in_flight=2)
    simulator.submit(0.0, Sequence(0, [0] * 8, SamplingParams(max_tokens=1000), 0, flight=flight))
    simulator.run()
    times = simulator.times[0]
    given = GivenCosts([GivenStage(dict(costs.points)) for _ in range(2)], 0.0005, drafts=line(0.001, 0.0))
    share = expected(given, [Member(share=0.6)], 1, 2, [3])
    assert (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(share.rate, rel=0.06)


@pytest.mark.parametrize("name", ["two-small", "two-large", "three-large"])
def test_a_prompts_first_token_is_sooner_where_costs_are_known(name: str):
    """In virtual time. Without costs prompts are cut as evenly as tokens allow."""
    rig = read_machine(Path(name))

    def first_tokens(costs: CostModel) -> list[float]:
        config = SchedulerConfig(rig.num_stages, rig.num_stages + 1, 512, 8, 10_000)
        found = []
        for length in (33, 128, 1000, 4000):
            simulator = Simulator(Scheduler(config, costs), rig, check=True)
            simulator.submit(0.0, Sequence(0, [0] * length, SamplingParams(max_tokens=2), 0))
            simulator.run()
            found.append(simulator.times[0][0])
        return found

    unknown = first_tokens(CostModel([StageCosts() for _ in rig.stages]))
    stages = [GivenStage(dict(stage.points)) for stage in rig.stages]
    known = first_tokens(GivenCosts(stages, rig.hops[0].fixed + rig.wait))
    ratios = [sooner / later for sooner, later in zip(known, unknown, strict=True)]
    assert max(ratios) <= 1
    assert ratios[2] < 0.85, "1,000 tokens"
