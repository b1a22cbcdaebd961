"""The scheduler drives stages on a virtual clock: same tokens, busy stages, bounded gaps, and everything ends."""

from itertools import pairwise
from random import Random

import pytest
from pipeline_sim import PipelineSim, config, sequence


def test_prompts_beside_decodes_keep_stages_busy():
    """Each group has its part of the prompts, so neither waits for the other's longer step."""
    sim = PipelineSim(config(2, token_budget=128, max_running=64), [(1.0, 0.05, 0.01)] * 2, check=False)
    for i in range(16):
        sim.submit(0.0, sequence(i, 5, 120))
    for i in range(6):
        sim.submit(20.0, sequence(16 + i, 500 + 171 * i, 1))
    sim.run()
    end = max(sim.times[16 + i][0] for i in range(6))
    assert min(sim.duty(40.0, end - 10.0)) >= 0.97


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_prompts_never_delay_a_decode_by_more_than_a_step_per_stage(num_stages: int):
    budget, (base, per_token, link) = 64, (1.0, 0.05, 0.02)
    sim = PipelineSim(
        config(num_stages, token_budget=budget, max_running=40), [(base, per_token, link)] * num_stages, check=False
    )
    for i in range(6):
        sim.submit(0.0, sequence(i, 5, 150))
    pick = Random(1)
    for i in range(60):
        sim.submit(pick.random() * 300, sequence(6 + i, pick.randint(1, 400), 3))
    sim.run()
    longest = base + per_token * budget
    for i in range(6):
        times = sim.times[i]
        gap = max(b - a for a, b in pairwise(times))
        # Its own step on each stage, and at most one of another group in front of it on each but the first.
        assert gap <= num_stages * (longest + link) * 1.001 + (num_stages - 1) * longest
