"""Who goes first, who is refused, and whose time is over."""

import pytest
from toy import House, blocks, drain, small

from splitinfer.core.kv.budget import BLOCK, NeverFits
from splitinfer.core.sequence import FinishReason


def order(house: House) -> list[int]:
    return list(dict.fromkeys(part.seq_id for part in drain(house)))


def test_priority_then_deadline_then_arrival():
    house = House(max_running=1)
    house.add([1] * 3)
    house.add([1] * 3, deadline=9.0)
    house.add([1] * 3, deadline=5.0)
    house.add([1] * 3, priority=1)
    house.add([1] * 3, priority=-1, deadline=1.0)
    house.add([1] * 3, priority=1, deadline=100.0)
    assert order(house) == [5, 3, 2, 1, 0, 4]


def test_prompts_of_higher_priority_are_read_first():
    house = House(max_running=4, token_budget=50)
    house.add([1] * 120, max_tokens=1)
    house.step()
    house.add([1] * 100, max_tokens=1, priority=1)
    parts = drain(house)
    assert [part.seq_id for part in parts][:2] == [1, 1]
    house.check_answers()


def test_what_never_fits_is_refused_at_once():
    with small(block=4):
        house = House(kv=blocks(3))
        house.add([1] * 5, max_tokens=7)
        with pytest.raises(
            NeverFits, match=r"^13 tokens \(prompt and answer\) need 16 bytes of KV on stage 0, which has 12$"
        ):
            house.add([1] * 5, max_tokens=8)
        house.check()


def test_the_context_bounds_what_a_request_needs():
    house = House(kv=blocks(3), max_len=600)
    house.add([1] * 10, max_tokens=10**6)


def test_whose_time_is_over_ends_wherever_it_is():
    house = House(max_running=1, num_groups=1)
    running = house.add([1] * 3, max_tokens=50, deadline=2.0)
    waiting = house.add([1] * 3, deadline=1.0)
    later = house.add([1] * 3, deadline=3.0)
    house.step()
    assert house.scheduler.deadlines.next == 1.0
    assert house.expire(0.9) == []
    assert house.expire(1.0) == [waiting]
    assert house.expire(2.5) == [running]
    assert house.sequences[running].finish_reason is FinishReason.ABORT
    house.run()
    assert house.scheduler.deadlines.next is None
    assert house.expire(1e9) == []
    assert house.reasons[later] is FinishReason.LENGTH
    house.check_answers()
    house.check_kv()


def test_a_large_request_is_not_passed_for_ever():
    """One that does not fit yet keeps its place: smaller ones behind it do not go around it."""
    house = House(kv=blocks(4), token_budget=2000, max_running=9)
    first = house.add([1] * 10, max_tokens=20)
    large = house.add([2] * (3 * BLOCK), max_tokens=10)
    small_ones = [house.add([3] * 10, max_tokens=5) for _ in range(5)]
    assert order(house) == [first, large, *small_ones]
