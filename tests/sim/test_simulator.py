"""Virtual time: what the simulated pipeline does is what the formulas say."""

from dataclasses import replace
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


def machine(num_stages: int, hop: float = 0.0, **more: float | bool) -> Machine:
    stages = (Costs.line(0.01, 0.0),) * num_stages
    return Machine(stages, (Hop(hop),) * num_stages, (8,) * num_stages, **more)  # type: ignore[arg-type]


def run(rig: Machine, answers: list[int], **more: object) -> Simulator:
    speculates, groups = bool(more.pop("speculates", False)), int(str(more.pop("groups", rig.num_stages)))
    flight = more.pop("flight", None)
    config = SchedulerConfig(
        groups, rig.num_stages + 1, 512, 64, 10_000, speculates=speculates, num_stages=rig.num_stages, fixed_groups=True
    )
    clockwork = Simulator(Scheduler(config), rig, check=True, **more)  # type: ignore[arg-type]
    for seq_id, count in enumerate(answers):
        seq = Sequence(seq_id, [seq_id] * 8, SamplingParams(max_tokens=count), 0, flight=flight)  # type: ignore[arg-type]
        clockwork.submit(0.0, seq)
    clockwork.run()
    return clockwork


@pytest.mark.parametrize(
    "buffers", [pytest.param(None, marks=pytest.mark.nightly), 88], ids=["computes at launch", "launches ahead"]
)
@pytest.mark.parametrize(
    "acceptance", [pytest.param(0.0, marks=pytest.mark.nightly), 0.6, pytest.param(0.9, marks=pytest.mark.nightly)]
)
def test_drafts_give_what_the_sum_over_verdicts_says(acceptance: float, buffers: int | None):
    """Another way to the same number: the scheduler's plans on a clock, against ``core.speculation.chooser``'s
    formula. Where devices launch ahead, drafts stand in line behind the first stage's step, so its time is divided in
    the same way; what the coordinator hears while it waits for a draft, it takes in behind that draft."""
    flight, count = Flight(first=3, further=3, in_flight=2), 1000
    rig = machine(2, hop=0.0005, draft=0.001)
    if buffers is not None:
        rig = replace(rig, launches_ahead=True, buffers=(buffers,) * 2)
    clockwork = run(rig, [count], speculates=True, acceptance=acceptance, flight=flight)
    times = clockwork.served[0].token_times
    measured = (len(times) - 1) / (times[-1] - times[0])
    stages = [GivenStage(dict(stage.points)) for stage in rig.stages]
    costs = GivenCosts(stages, 0.0005, drafts=line(0.001, 0.0))
    assert measured == pytest.approx(expected(costs, [Member(share=acceptance)], 1, 2, [3]).rate, rel=0.06)


@pytest.mark.parametrize("name", ["two-small", "two-large", "three-large"])
def test_a_prompts_first_token_is_sooner_where_costs_are_known(name: str):
    """In virtual time. Without costs prompts are cut as evenly as tokens allow."""
    rig = read_machine(Path(name))

    def first_tokens(costs: CostModel) -> list[float]:
        config = SchedulerConfig(rig.num_stages, rig.num_stages + 1, 512, 8, 10_000)
        found = []
        for length in (33, 128, 1000, 4000):
            clockwork = Simulator(Scheduler(config, costs), rig, check=True)
            clockwork.submit(0.0, Sequence(0, [0] * length, SamplingParams(max_tokens=2), 0))
            clockwork.run()
            found.append(clockwork.served[0].token_times[0])
        return found

    unknown = first_tokens(CostModel([StageCosts() for _ in rig.stages]))
    stages = [GivenStage(dict(stage.points)) for stage in rig.stages]
    known = first_tokens(GivenCosts(stages, rig.hops[0].fixed + rig.wait))
    ratios = [sooner / later for sooner, later in zip(known, unknown, strict=True)]
    assert max(ratios) <= 1
    assert ratios[2] < 0.85, "1,000 tokens"
