"""A scheduler's sequences go on with a scheduler of other stages."""

from dataclasses import replace

import pytest

from splitinfer.core.kv.budget import KVBudget, NeverFits, StageKV
from splitinfer.core.plan import SampledSlice, SampledToken, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence

TWO = SchedulerConfig(num_groups=2, max_in_flight=3, token_budget=64, max_running=4, max_len=100, num_stages=2)


def sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1] * 9, SamplingParams(max_tokens=20), seed=seq_id, deadline=50.0 + seq_id)


def result_of(plan: StepPlan) -> StepResult:
    """Token 7 for every slice that wants one."""
    sampled = tuple(SampledSlice(part.seq_id, (SampledToken(7),)) for part in plan.slices if part.num_logits)
    return StepResult(plan.step, sampled)


def test_what_was_sampled_stays_and_the_rest_is_computed_again():
    scheduler = Scheduler(TWO)
    for seq_id in range(3):
        scheduler.add(sequence(seq_id))
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(result_of(first))
    before = {seq.seq_id: list(seq.tokens) for seq in scheduler.running.values()}
    scheduler.requeue_all()
    moved = scheduler.moved_to(replace(TWO, num_groups=3, max_in_flight=4, num_stages=3))
    assert len(moved.costs.stages) == 3
    assert {seq.seq_id: list(seq.tokens) for seq in moved.waiting if seq.seq_id in before} == before
    assert len(moved.waiting) == 3
    plan = moved.schedule()
    assert plan is not None
    assert plan.step > first.step, "steps of the stages before are not taken for those of the new ones"
    assert all(part.start == 0 and len(part.token_ids) == len(before.get(part.seq_id, [1] * 9)) for part in plan.slices)
    assert moved.expire(60.0) == [0, 1, 2], "deadlines are kept"


def test_what_has_no_room_moves_nothing():
    scheduler = Scheduler(TWO)
    scheduler.add(sequence(0))
    scheduler.requeue_all()
    with pytest.raises(NeverFits):
        scheduler.moved_to(replace(TWO, kv=KVBudget((StageKV(10**6, 1), StageKV(10, 1)))))
    assert len(scheduler.waiting) == 1
    assert scheduler.schedule() is not None
