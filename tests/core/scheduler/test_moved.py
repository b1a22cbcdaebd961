"""A scheduler's sequences go on with a scheduler of other stages."""

from dataclasses import replace

import pytest
from toy import House

from splitinfer.core.kv.budget import KVBudget, NeverFits, StageKV


def test_what_was_sampled_stays_and_the_rest_is_computed_again():
    house = House(max_in_flight=3, token_budget=64, max_running=4, num_stages=2)
    for seq_id in range(3):
        house.add([1] * 9, max_tokens=20, deadline=50.0 + seq_id)
    first = house.step()
    house.deliver()
    before = {seq.seq_id: list(seq.tokens) for seq in house.scheduler.running.values()}
    house.scheduler.requeue_all()
    moved = house.scheduler.moved_to(replace(house.scheduler.config, num_groups=3, max_in_flight=4, num_stages=3))
    assert len(moved.costs.stages) == 3
    assert len(moved.waiting) == 3
    assert {seq.seq_id: list(seq.tokens) for seq in moved.waiting if seq.seq_id in before} == before
    plan = moved.schedule()
    assert plan is not None
    assert plan.step > first.step, "steps of the stages before are not taken for those of the new ones"
    assert all(part.start == 0 and len(part.token_ids) == len(before.get(part.seq_id, [1] * 9)) for part in plan.slices)
    assert moved.expire(60.0) == [0, 1, 2], "deadlines are kept"


def test_what_has_no_room_moves_nothing():
    house = House()
    house.add([1] * 9)
    house.scheduler.requeue_all()
    small = replace(house.scheduler.config, kv=KVBudget((StageKV(10**6, 1), StageKV(10, 1))))
    with pytest.raises(NeverFits):
        house.scheduler.moved_to(small)
    assert len(house.scheduler.waiting) == 1
    assert house.step() is not None
