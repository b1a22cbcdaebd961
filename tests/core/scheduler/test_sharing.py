"""Requests that begin alike compute what they share once."""

import pytest
from toy import VOCAB, House, blocks, drain, small

from splitinfer.core.kv.block_tree import BlockTree, Match
from splitinfer.core.plan import StepPlan
from splitinfer.core.scheduler import kv_manager
from splitinfer.core.sequence import FinishReason


@pytest.fixture(autouse=True)
def blocks_of_four():
    with small(block=4):
        yield


def computed(house: House) -> int:
    return sum(house.toy.num_computed.values())


def turn(house: House, tokens: list[int]) -> StepPlan:
    """The plan that begins a request, which then runs to its end."""
    house.add(tokens, max_tokens=3)
    plan = house.plan()
    house.check()
    return plan


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_the_next_turn_takes_over_the_kv_that_the_last_one_left(num_groups: int, whole_blocks: bool):
    house = House(token_budget=100, num_groups=num_groups, max_in_flight=3, whole_blocks=whole_blocks)
    turn(house, [1, 2, 3, 4, 1])
    for number in range(3):
        plan = turn(house, [*house.tokens(number), 2, 2])
        assert plan.new[0].takes_over == number
        assert plan.slices[0].start == len(house.tokens(number)) - 1
        assert not plan.freed
    assert house.toy.num_taken_over == 3


def test_other_kv_goes_when_a_request_begins():
    house = House(token_budget=100)
    turn(house, [1, 2, 3, 4, 1])
    plan = turn(house, [3, 1, 1])
    assert plan.freed == (0,)
    assert plan.new[0].takes_over is None
    again = turn(house, [*house.tokens(0), 2])
    assert (again.freed, again.new[0].takes_over, again.slices[0].start) == ((1,), None, len(house.tokens(0)) - 1)


@pytest.mark.parametrize(("whole_blocks", "taken"), [(False, 1), (True, 0)])
def test_an_edited_turn_goes_back_in_the_kv_that_was_left(whole_blocks: bool, taken: int):
    house = House(token_budget=100, whole_blocks=whole_blocks)
    turn(house, [1, 2, 3, 4, 1])
    said = house.tokens(0)
    plan = turn(house, [*said[:6], (said[6] + 1) % 5, 2, 2])
    assert plan.slices[0].start == (4 if whole_blocks else 6)
    assert house.toy.num_taken_over == taken


def test_a_shorter_request_copies_rather_than_to_hold_more_than_is_reserved():
    house = House(token_budget=100)
    house.add([1, 2, 3, 4, 1], max_tokens=30)
    house.run()
    turn(house, [*house.tokens(0)[:9], 2])
    assert house.toy.num_taken_over == 0


def test_kv_is_left_where_nobody_else_needs_it():
    house = House(token_budget=100)
    for _ in range(2):
        house.add([1, 2, 3, 4, 1], max_tokens=3)
    house.run()
    last = house.scheduler.kv.retained
    assert last is not None, "the last of them was alone"
    assert list(house.toy.left) == [last.seq_id]
    small = House(token_budget=100, kv=blocks(4))  # two for the sequence, two for what is stored of it
    turn(small, [1, 2, 3, 4, 1])
    assert small.toy.left
    turn(small, [*small.tokens(0), 2])
    assert not small.toy.left, "it has three, and so has what is stored"


def test_what_was_left_goes_with_its_session():
    house = House(token_budget=100)
    house.add([1, 2, 3, 4, 1], max_tokens=3, session="ours")
    house.run()
    house.scheduler.kv.forget("theirs")
    assert house.step() is None
    house.scheduler.kv.forget("ours")
    plan = house.plan()
    assert plan.freed == (0,)
    house.deliver()
    house.check_kv()
    assert not house.toy.blocks


def test_where_states_are_kept_chunks_end_with_blocks():
    house = House(token_budget=7, whole_blocks=True)
    house.add([1] * 13, max_tokens=1)
    assert all(part.end <= (part.start // 4 + 1) * 4 for part in drain(house))
    house.check_kv()


def test_a_plan_has_no_more_of_prefixes_than_a_frame_can_carry(monkeypatch: pytest.MonkeyPatch):
    """Each sequence comes with its prefix's tokens, however many share them: 16 answers to a prompt of 100,000."""
    monkeypatch.setattr(kv_manager, "MAX_PREFIXES", 70)
    house = House(token_budget=1000, max_running=40)
    prompt = [1, 2, 3, 4] * 8
    house.add(prompt, max_tokens=1)
    house.run()
    for _ in range(5):
        house.add([*prompt, 1], max_tokens=4)
    told = list[int]()
    for _ in range(4):
        plan = house.step()
        told.append(sum(len(new.prefix) for new in plan.new) if plan is not None else 0)
        house.deliver()
    assert told == [64, 64, 32, 0]
    house.check()


def test_many_who_come_at_once_with_one_system_prompt_compute_it_once():
    house = House(token_budget=9, max_running=40, max_in_flight=3)
    system = [1, 2, 3, 4] * 8
    for i in range(20):
        house.add([*system, i % VOCAB, (i // VOCAB) % VOCAB], max_tokens=2)
    house.check()
    # 2 tokens of one's own, and the first of the answer.
    assert computed(house) <= len(system) + 20 * 3
    assert [house.sequences[i].num_cached >= len(system) for i in range(20)] == [False] + [True] * 19


def test_those_who_wait_for_one_prefix_are_not_compared_with_all_blocks_at_every_step(monkeypatch: pytest.MonkeyPatch):
    house = House(token_budget=9, max_running=400, num_groups=1, max_in_flight=1)
    system = [1, 2, 3, 4] * 40
    house.add(system, max_tokens=1)
    house.step()
    for i in range(200):
        house.add([*system, i % VOCAB, i // VOCAB % VOCAB], max_tokens=1)
    asked = list[int]()
    find = BlockTree.find

    def counted(tree: BlockTree, tokens: list[int]) -> Match:
        asked.append(len(tokens))
        return find(tree, tokens)

    monkeypatch.setattr(BlockTree, "find", counted)
    for _ in range(8):
        house.deliver()
        house.step()
    assert asked == [], "their keys say it"
    house.check()
    assert len(asked) <= 3 * 200, "and a step that is full looks for no more"


def test_others_do_not_wait_behind_one_that_waits_for_anothers_blocks():
    house = House(token_budget=6, max_running=10, num_groups=1, max_in_flight=1)
    house.add([1] * 12, max_tokens=1)
    house.step()
    house.add([1] * 12, max_tokens=1)  # waits for the first one's blocks
    house.add([2] * 3, max_tokens=1)
    order = list(dict.fromkeys(part.seq_id for part in drain(house)))
    assert order == [0, 2, 1]
    house.check_answers()


@pytest.mark.parametrize("steps", range(6))
def test_when_the_one_that_computes_ends_who_waited_goes_on_from_there(steps: int):
    house = House(token_budget=4, max_running=10, max_in_flight=2)
    prompt = [1, 2] * 10
    house.add(prompt)
    house.step()
    house.add(prompt, max_tokens=3)
    for _ in range(steps):
        house.step() or house.deliver()
    house.finish(0)
    house.check()
    assert computed(house) <= len(prompt) + 3 + 4


def test_a_request_that_failed_leaves_only_the_blocks_before():
    house = House(token_budget=3)
    seq_id = house.add([1] * 10)
    house.step()
    house.finish(seq_id, FinishReason.ERROR)
    house.run()
    assert not house.scheduler.prefix_cache.tree
    assert not house.toy.blocks
    assert not house.toy.caches
