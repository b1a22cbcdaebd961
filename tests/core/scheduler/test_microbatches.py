"""Groups are balanced and sticky, take turns, and get equal shares of prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import House, drain, small

from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.microbatches import MIN_CHUNK, MicroBatches, even_share
from splitinfer.core.sequence import Sequence


def sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1], SamplingParams(), 0)


def ids(batches: MicroBatches) -> list[list[int]]:
    return [[seq.seq_id for seq in group] for group in batches._groups]


def test_the_last_to_join_moves_and_who_is_in_flight_stays():
    batches = MicroBatches(2)
    them = [sequence(i) for i in range(6)]
    for seq in them:
        batches.join(seq)
    them[1].num_in_flight = them[3].num_in_flight = them[5].num_in_flight = 1
    for i in (0, 2):
        batches.leave(them[i])
    batches.balance()
    assert ids(batches) == [[4], [1, 3, 5]]
    them[3].num_in_flight = 0
    batches.balance()
    assert ids(batches) == [[4, 3], [1, 5]]


@given(st.integers(0, 10_000), st.integers(MIN_CHUNK, 600), st.integers(1, 8), st.booleans())
def test_shares_are_even_and_no_crumbs(remaining: int, most: int, num_groups: int, rounds: bool):
    share = even_share(remaining, most, num_groups, rounds=rounds)
    assert share <= most
    steps = -(-remaining // share) if share else 0
    assert share * steps - remaining < max(steps, share, 1), "the steps are equal, but for what does not divide"
    if remaining <= most * num_groups:
        assert steps <= num_groups, "a round does all"
    if remaining <= most:
        assert share >= min(MIN_CHUNK, remaining)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
def test_all_decode_and_membership_is_sticky(num_groups: int):
    house = House(num_groups=num_groups, max_in_flight=4, token_budget=64, max_running=12)
    for i in range(12):
        house.add([i % 5] * 3, max_tokens=30)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for _ in range(200):
        plan = house.step()
        if plan is None:
            house.deliver()
        elif sum(len(house.generated[i]) > 1 for i in range(12)) == 12 and not house.reasons:
            seen.setdefault(plan.step % num_groups, set()).add(tuple(part.seq_id for part in plan.slices))
        if house.reasons:
            break
    assert all(len(members) == 1 for members in seen.values()), "a group changed while nobody came or went"
    assert sorted(seq_id for (members,) in seen.values() for seq_id in members) == list(range(12))
    assert {len(members) for (members,) in seen.values()} == {12 // num_groups}


def test_the_steps_of_a_round_share_the_prompts():
    house = House(num_groups=2, token_budget=512, max_running=8)
    for _ in range(4):
        house.add([1], max_tokens=200)
    for _ in range(20):
        house.step() or house.deliver()
    house.add([2] * 700)
    sizes = []
    while sum(sizes) < 700:
        plan = house.step()
        if plan is None:
            house.deliver()
        else:
            sizes += [len(part.token_ids) for part in plan.slices if part.seq_id == 4]
    assert sizes == [350, 350]


def test_a_lone_long_prompt_goes_in_as_few_steps_as_possible_all_alike():
    house = House(num_groups=2, max_in_flight=3, token_budget=512, max_running=8)
    house.add([1] * 2200, max_tokens=1)
    assert [len(part.token_ids) for part in drain(house)] == [440] * 5


def test_more_decodes_than_tokens_in_a_step_take_turns():
    with small():
        house = House(num_groups=1, token_budget=2, max_running=5, max_in_flight=1)
        for i in range(5):
            house.add([i], max_tokens=12)
        most = 0
        while not house.reasons:
            house.step() or house.deliver()
            if len(house.scheduler.batches) == 5:
                made = [len(generated) for generated in house.generated.values()]
                most = most or max(made) - min(made)
                assert max(made) - min(made) <= most + 1, "somebody stays behind"
        house.check()
