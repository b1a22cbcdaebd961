"""The scheduler drives stages on a virtual clock: same tokens, busy stages, bounded gaps, and everything ends."""

from itertools import pairwise
from random import Random

import pytest
from pipeline_sim import PipelineSim, Stage
from toy import config_of

from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.sequence import Sequence


def sequence(seq_id: int, prompt: int, answer: int, **more: int | float | None) -> Sequence:
    return Sequence(seq_id, [(seq_id * 7 + i) % 5 for i in range(prompt)], SamplingParams(max_tokens=answer), 0, **more)


def config(num_stages: int, **more: object) -> SchedulerConfig:
    return config_of(num_groups=num_stages, max_in_flight=num_stages + 1, **{"max_len": 100_000, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_in_saturation_all_stages_are_busy(num_stages: int):
    sim = PipelineSim(
        config(num_stages, token_budget=512, max_running=64), [Stage(1.0, 0.01, 0.01)] * num_stages, check=False
    )
    for i in range(8 * num_stages):
        sim.submit(0.0, sequence(i, 5, 200))
    sim.run()
    end = min(times[-1] for times in sim.times.values())
    assert min(sim.duty(end * 0.1, end * 0.95)) >= 0.97


def test_prompts_beside_decodes_keep_stages_busy():
    """Each group has its part of the prompts, so neither waits for the other's longer step."""
    sim = PipelineSim(config(2, token_budget=128, max_running=64), [Stage(1.0, 0.05, 0.01)] * 2, check=False)
    for i in range(16):
        sim.submit(0.0, sequence(i, 5, 120))
    for i in range(6):
        sim.submit(20.0, sequence(16 + i, 500 + 171 * i, 1))
    sim.run()
    end = max(sim.times[16 + i][0] for i in range(6))
    assert min(sim.duty(40.0, end - 10.0)) >= 0.97


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_prompts_never_delay_a_decode_by_more_than_a_step_per_stage(num_stages: int):
    budget, stage = 64, Stage(1.0, 0.05, 0.02)
    sim = PipelineSim(config(num_stages, token_budget=budget, max_running=40), [stage] * num_stages, check=False)
    for i in range(6):
        sim.submit(0.0, sequence(i, 5, 150))
    pick = Random(1)
    for i in range(60):
        sim.submit(pick.random() * 300, sequence(6 + i, pick.randint(1, 400), 3))
    sim.run()
    longest = stage.a + stage.b * budget
    for i in range(6):
        times = sim.times[i]
        gap = max(b - a for a, b in pairwise(times))
        # Its own step on each stage, and at most one of another group in front of it on each but the first.
        assert gap <= num_stages * (longest + stage.link) * 1.001 + (num_stages - 1) * longest
