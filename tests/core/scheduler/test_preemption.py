"""Who gives up its KV when memory is short, and that nobody can tell from the tokens."""

import pytest
from toy import House, ToyDisk, blocks, small

from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from tests.core.given_costs import line


def prefilled(house: House, *prompts: int, max_tokens: int = 40, **more: int) -> list[int]:
    """Requests whose prompts of so many tokens have been read, one after the other."""
    seq_ids = []
    for length in prompts:
        seq_ids.append(house.add([length % 5] * length, max_tokens, **more))
        house.until(lambda: house.sequences[seq_ids[-1]] in house.scheduler.batches)
    return seq_ids


def preempted(house: House) -> set[int]:
    return {i for i, seq in house.sequences.items() if seq.num_preemptions}


@pytest.mark.parametrize(("priority", "gives_up"), [(0, 1), (-1, 0)], ids=["the youngest", "the lowest priority"])
def test_who_gives_up_gets_the_tokens_it_gets_alone(priority: int, gives_up: int):
    with small(block=4):
        house = House(num_groups=1, max_running=4, token_budget=2000, kv=blocks(12))
        prefilled(house, 3, priority=priority)
        prefilled(house, 3)
        house.run()
        assert preempted(house) == {gives_up}
        house.check_answers()
        house.check_kv()


def stored(house: House) -> list[list[int]]:
    """The tokens of the paths that are stored, by their last blocks."""
    leaves = [block for block in house.scheduler.prefix_cache.tree if not block.children]
    return sorted([token for block in leaf.path for token in block.tokens] for leaf in leaves)


def test_stored_blocks_go_first_the_least_recently_used_of_them():
    with small(block=4):
        house = House(num_groups=2, max_running=4, token_budget=2000, kv=blocks(12))
        for token in (1, 3):
            house.add([token] * 7, max_tokens=2)
            house.run()
        house.add([2] * 7, max_tokens=14)
        house.run()
        assert [tokens[0] for tokens in stored(house)] == [2, 3]
        assert preempted(house) == set()
        house.check_answers()
        house.check_kv()


@pytest.mark.parametrize("is_of_the_oldest", [False, True])
def test_a_newcomer_makes_blocks_go_when_it_does_not_fit_beside_them_but_not_its_own(is_of_the_oldest: bool):
    with small(block=4):
        house = House(token_budget=2000, kv=blocks(6))
        for token in (1, 3):
            house.add([token] * 7, max_tokens=2)
            house.run()
        new = house.add([1 if is_of_the_oldest else 2] * 8 + [2] * 4, max_tokens=2)
        house.step()
        if is_of_the_oldest:
            assert house.sequences[new].kv.num_reused >= 7
        else:
            assert [tokens[0] for tokens in stored(house)] == [2, 3]
        house.check()


@pytest.mark.parametrize("num_disks", [1, 2])
def test_what_was_given_up_comes_back_from_disk(num_disks: int):
    """What is not on disk is written before it goes, though there is no place for it in memory."""
    with small(block=4):
        disks = [ToyDisk() for _ in range(num_disks)]
        house = House(num_groups=1, max_running=4, token_budget=2000, kv=blocks(22), disks=disks)
        old, young = prefilled(house, 23, 3)
        house.until(lambda: preempted(house))
        computed = house.toy.num_computed[young]
        for disk in disks:
            disk.catch_up()
        house.run()
        prefix_cache = house.scheduler.prefix_cache
        assert prefix_cache.num_swapped > 0
        assert prefix_cache.num_fetched >= computed - computed % 4
        assert house.toy.num_computed[young] < 43 + 8, "computed again"
        house.check_answers()
        house.check_kv()
        assert house.sequences[old].num_preemptions == 0


def test_where_reading_is_slower_nothing_is_read():
    with small(block=4):
        disks = [ToyDisk()]
        house = House(num_groups=1, max_running=4, token_budget=8, kv=blocks(12), disks=disks)
        house.scheduler.costs.stages[0] = line(0.0, 1e-3)
        house.scheduler.prefix_cache.seconds_per_token = 2e-3
        prefilled(house, 3, 3)
        house.run()
        assert preempted(house)
        assert house.scheduler.prefix_cache.num_swapped == house.scheduler.prefix_cache.num_fetched == 0
        house.check_answers()


def test_whoever_gave_up_is_the_first_of_its_priority_to_come_back():
    with small(block=4):
        house = House(num_groups=1, max_running=3, token_budget=2000, kv=blocks(12))
        _, young = prefilled(house, 3, 3)
        others = [house.add([4] * 30, max_tokens=8, deadline=1.0) for _ in range(3)]
        high = house.add([3] * 44, max_tokens=4, priority=1)
        house.until(lambda: preempted(house))
        assert [seq.seq_id for seq in house.scheduler.waiting] == [high, young, *others]
        house.check()


@pytest.mark.parametrize("junior", [1, 3, 5])
@pytest.mark.parametrize("senior", range(1, 6))
def test_who_lacks_kv_does_not_take_the_place_of_one_that_could_go(junior: int, senior: int):
    with small(block=5):
        house = House(num_groups=1, max_running=2, token_budget=1, kv=blocks(5))
        prefilled(house, junior, max_tokens=20)
        prefilled(house, senior, max_tokens=20, priority=1)
        house.check()


def test_nobody_gives_up_for_a_junior_that_has_no_kv_yet():
    with small(block=4):
        house = House(num_groups=1, max_running=2, token_budget=2000, kv=blocks(4), keeps_blocks=False)
        prefilled(house, 13, max_tokens=2)
        house.add([1], max_tokens=1)
        house.run()
        assert preempted(house) == set()
        house.check_answers()


def test_a_prompt_goes_on_where_the_decodes_that_have_all_rows_lack_kv():
    """The junior's decode fills a step, and memory has no place for it; the senior is in the middle of its prompt."""
    drains = PolicyConfig(policy=PolicyName.WATERMARK, kv_high=0.6, kv_low=0.0, min_dwell=1)
    with small(block=4):
        house = House(num_groups=1, token_budget=1, kv=blocks(6), policy_config=drains)
        prefilled(house, 4, max_tokens=20)
        senior = house.add([1] * 13, max_tokens=3, priority=1)
        house.run()
        assert house.sequences[senior].num_preemptions == 0
        house.check_answers()
