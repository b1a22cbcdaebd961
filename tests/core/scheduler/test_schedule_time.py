"""Planning is no part of a step's time, however many wait: ``pytest -s`` prints what it takes."""

import gc
import statistics
import time
from collections import deque

import pytest

from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.plan import SampledSlice, SampledToken, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence


def answer(plan: StepPlan) -> StepResult:
    token = (SampledToken(1),)
    return StepResult(plan.step, tuple(SampledSlice(part.seq_id, token) for part in plan.slices if part.num_logits))


def time_of_schedule(num_running: int, num_waiting: int) -> float:
    """Seconds for one plan, in the median of 300."""
    kv = KVBudget((StageKV(10**12, 1000), StageKV(10**12, 1000)))
    scheduler = Scheduler(SchedulerConfig(2, 3, 512, num_running, 10**5, max_waiting=10**4, kv=kv))
    for i in range(num_running + num_waiting):
        scheduler.add(Sequence(i, [1] * 200, SamplingParams(max_tokens=500), 0))
    times, under_way = list[float](), deque[StepPlan]()
    while len(times) < 300:
        began = time.perf_counter()
        plan = scheduler.schedule()
        took = time.perf_counter() - began
        if plan is None:
            scheduler.update(answer(under_way.popleft()))
        else:
            times.append(took)
            under_way.append(plan)
    return statistics.median(times)


@pytest.mark.parametrize("num_running", [32, 64])
def test_a_plan_takes_well_under_a_millisecond(num_running: int):
    gc.collect()
    few, many = time_of_schedule(num_running, 10), time_of_schedule(num_running, 5000)
    print(f"\n{num_running} running: {few * 1e6:.0f} us with 10 waiting, {many * 1e6:.0f} us with 5000")  # noqa: T201
    assert many < 5e-3, "on any machine, however busy"
    assert many < 5 * few + 1e-4, "who waits costs nothing"
