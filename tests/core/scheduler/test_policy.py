"""Who goes first: each policy by itself, and what the scheduler makes of it."""

from itertools import pairwise

import pytest
from toy import House, drain, small

from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.policy import Policy, PolicyConfig, PolicyDecision, PolicyName
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence
from splitinfer.machine.costs import Costs
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator


@pytest.mark.parametrize("name", list(PolicyName))
def test_where_nobody_decodes_prompts_have_all(name: PolicyName):
    policy = Policy(PolicyConfig(policy=name, prefill_share=0.3))
    assert policy.decide(0) == PolicyDecision(decodes_go=True, share=1.0, admits=True)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (PolicyName.STALL_FREE, PolicyDecision(decodes_go=True, share=0.3, admits=True)),
        (PolicyName.PREFILL_FIRST, PolicyDecision(decodes_go=False, share=1.0, admits=True)),
        (PolicyName.WATERMARK, PolicyDecision(decodes_go=False, share=1.0, admits=True)),
        (PolicyName.DECODE_FIRST, PolicyDecision(decodes_go=True, share=0.3, admits=False)),
    ],
)
def test_where_somebody_decodes(name: PolicyName, order: PolicyDecision):
    assert Policy(PolicyConfig(policy=name, prefill_share=0.3)).decide(3) == order


@pytest.mark.parametrize("name", [PolicyName.PREFILL_FIRST, PolicyName.WATERMARK])
def test_a_decode_that_waited_too_long_goes(name: PolicyName):
    policy = Policy(PolicyConfig(policy=name, max_decode_gap=2.0))
    assert not policy.decide(3, waited=1.9).decodes_go
    assert policy.decide(3, waited=2.0).decodes_go


def test_the_watermark_has_hysteresis_and_dwells():
    policy = Policy(PolicyConfig(policy=PolicyName.WATERMARK, kv_high=0.8, kv_low=0.5, min_dwell=3))
    seen = []
    for share in [0.9, 0.9, 0.9, 0.9, 0.6, 0.4, 0.4, 0.6, 0.7, 0.85]:
        policy.scheduled(4, share)
        seen.append(policy.drains)
    # Three steps on a side at least; at 0.6 it goes on draining, at 0.7 it goes on filling.
    assert seen == [False, False, True, True, True, False, False, False, False, True]


def test_watermark_needs_room_between_its_marks():
    with pytest.raises(ValueError, match="kv_low and kv_high must be 0 <= low < high <= 1"):
        PolicyConfig(kv_low=0.9)


def steps(house: House) -> list[list[tuple[int, int]]]:
    """Each plan's sequences, with their numbers of tokens."""
    found = []
    while (plan := house.step()) is not None or house.toy.under_way:
        if plan is not None:
            found.append([(part.seq_id, len(part.token_ids)) for part in plan.slices])
        while house.toy.under_way:
            house.deliver()
    return [step for step in found if step]


@pytest.mark.parametrize(
    ("policy_config", "budget", "prompt", "expected"),
    [  # decodes wait until all prompts are read; nobody joins those that decode; prompts get half of what is left
        (PolicyConfig(PolicyName.PREFILL_FIRST), 4, 9, [[(1, 3)], [(1, 3)], [(1, 3)], [(0, 1), (1, 1)], [(0, 1)]]),
        (PolicyConfig(PolicyName.DECODE_FIRST), 8, 9, [[(0, 1)], [(0, 1)], [(1, 5)], [(1, 4)], [(1, 1)]]),
        (PolicyConfig(prefill_share=0.5), 41, 39, [[(0, 1), (1, 20)], [(0, 1), (1, 19)], [(1, 1)]]),
    ],
)
def test_a_prompt_that_comes_while_another_decodes(
    policy_config: PolicyConfig, budget: int, prompt: int, expected: list[list[tuple[int, int]]]
):
    with small(min_chunk=2):
        house = House(num_groups=1, token_budget=budget, max_running=3, policy_config=policy_config)
        house.add([1] * 3, max_tokens=3)
        house.step()
        house.deliver()
        house.add([2] * prompt, max_tokens=2)
        assert steps(house) == expected
        house.check_answers()


def test_two_prompts_can_be_read_side_by_side():
    with small(min_chunk=2):
        side_by_side = PolicyConfig(max_partial_prefills=2)
        house = House(num_groups=1, max_in_flight=1, token_budget=16, max_running=3, policy_config=side_by_side)
        house.add([1] * 40, max_tokens=1)
        house.add([2] * 8, max_tokens=1)
        order = [(part.seq_id, len(part.token_ids)) for part in drain(house)]
        assert order[:2] == [(0, 8), (1, 8)], "the short one needs not wait for the long one"
        assert sum(size for seq_id, size in order if seq_id == 0) == 40


def sequence(seq_id: int, prompt: int, answer: int) -> Sequence:
    return Sequence(seq_id, [seq_id, *(i % 5 for i in range(1, prompt))], SamplingParams(max_tokens=answer), 0)


def test_the_objective_is_kept_and_used_up():
    """Steps are as large as the objective lets them be, whatever that is in tokens; learned while it runs."""
    num_stages, slo = 3, 0.08
    config = SchedulerConfig(num_stages, num_stages + 1, 512, 40, 100_000, policy_config=PolicyConfig(itl_slo=slo))
    stages = (Costs.line(0.01, 0.0005),) * num_stages
    sim = Simulator(Scheduler(config), Machine(stages, (Hop(0.001),) * num_stages, (1,) * num_stages))
    for i in range(8):
        sim.submit(0.0, sequence(i, 20, 700))
    for i in range(6):
        sim.submit(2.0 + 2.5 * i, sequence(8 + i, 3000, 1))
    sim.run()
    gaps = sorted(b - a for i in range(8) for a, b in pairwise(sim.times[i]) if a > 3.0)
    assert gaps[int(0.99 * len(gaps))] <= 1.02 * slo
    assert gaps[-1] <= 1.1 * slo
    reading = [(2.0 + 2.5 * i, sim.times[8 + i][0]) for i in range(1, 4)]
    busy = [
        b - a
        for i in range(8)
        for a, b in pairwise(sim.times[i])
        if any(first < a and b < last for first, last in reading)
    ]
    # Beyond 64 rows sixteen are taken at a time, beyond 256 sixty-four.
    assert sum(busy) / len(busy) > 0.7 * slo - 0.008 * num_stages, "prompts get what the objective leaves"
