"""What is on every stage's disk is read back by plan, and only what every stage could read is used."""

from collections.abc import Iterator

import pytest
from toy import House, ToyDisk, blocks, drain, kept_by_all, small

from splitinfer.core.kv.block_tree import Block, BlockTree, DiskBlock, chained
from splitinfer.core.kv.budget import NOTHING, KVBudget, StageKV
from splitinfer.core.kv.prefix_cache import FETCHES, PrefixCache, PrefixCacheConfig
from splitinfer.core.plan import Fetch, Save
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.sequence import FinishReason, Sequence
from tests.core.invariants import check_cache, check_tree

PROMPT = [1, 2, 3, 4, 1, 1, 3, 3, 2, 2, 0, 4, 1]  # three blocks of four, and one token


@pytest.fixture(autouse=True)
def blocks_of_four() -> Iterator[None]:
    with small(block=4):
        yield


@pytest.fixture
def disks() -> list[ToyDisk]:
    """Two stages' disks, after somebody has asked ``PROMPT``."""
    disks = [ToyDisk(), ToyDisk()]
    house = House(disks=disks, token_budget=100)
    house.add(PROMPT, max_tokens=1)
    house.run()
    for disk in disks:
        disk.catch_up()
    return disks


def ask(house: House, prompt: list[int] = PROMPT, max_tokens: int = 3) -> int:
    seq_id = house.add(prompt, max_tokens=max_tokens)
    house.check()
    return house.sequences[seq_id].kv.num_reused


def test_what_an_idle_pipeline_has_written_becomes_known():
    disks = [ToyDisk(), ToyDisk()]
    house = House(disks=disks, token_budget=100)
    house.add(PROMPT, max_tokens=1)
    house.run()
    cache = house.scheduler.prefix_cache
    for disk in disks:
        assert cache.files.ask()
        house.run()
        assert not len(cache.disk), "not every stage has written it"
        disk.catch_up()
    assert cache.files.ask()
    house.run()
    assert len(cache.disk) == 4
    assert not cache.files.ask(), "there is nothing left to ask for"
    assert house.scheduler.is_idle


def test_a_stage_that_never_writes_is_not_asked_for_ever():
    house = House(disks=[ToyDisk()], token_budget=100)
    house.add(PROMPT, max_tokens=1)
    house.run()
    asked = 0
    while house.scheduler.prefix_cache.files.ask():
        house.run()
        asked += 1
    assert 10 < asked < 100


def test_blocks_travel_a_few_at_a_time(disks: list[ToyDisk]):
    house = House(disks=disks, token_budget=100, max_in_flight=3)
    house.add(PROMPT, max_tokens=1)
    plans = []
    while (plan := house.step()) is not None or house.toy.under_way:
        if plan is None:
            house.deliver()
        else:
            plans.append(plan)
    assert [len(plan.fetches) for plan in plans if plan.fetches] == [FETCHES, 3 - FETCHES]
    assert all(not plan.slices for plan in plans if plan.fetches)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_one_stage_lacks_is_dropped_by_all_with_what_follows(disks: list[ToyDisk], lost: int, index: int):
    house = House(disks=disks, token_budget=100)
    keys = sorted(disks[lost].files, key=lambda key: len(disks[lost].files[key][1].before))
    del disks[lost].files[keys[index]]
    assert ask(house) == 4 * index
    for disk in disks:
        disk.catch_up()
    again = House(disks=disks, token_budget=100)
    assert ask(again) == len(PROMPT) - 1


class Counted(Block):
    """A block that counts how often one before it was looked at."""

    __slots__ = ()
    num_looks = 0

    @property
    def parent(self) -> Block | None:  # type: ignore[override]
        Counted.num_looks += 1
        return Block.parent.__get__(self)  # type: ignore[attr-defined, no-any-return]


def test_a_conversation_of_many_blocks_is_read_from_disk_after_a_restart_and_goes_on():
    """Two turns wait for the same blocks. To know which are pinned, each block is looked at once."""
    disks, talk = [ToyDisk()], [*range(5)] * 1000

    def house() -> House:
        return House(disks=disks, token_budget=2000, max_len=6000)

    first = house()
    first.add(talk, max_tokens=1)
    drain(first)
    disks[0].catch_up(5000)
    again = house()
    for turn in ([1], [2, 3]):
        again.add([*talk, *turn], max_tokens=2)
    again.step()
    cache = again.scheduler.prefix_cache
    for block in cache.tree:
        block.__class__ = Counted
    assert len(cache.pinned) == 1250
    assert Counted.num_looks <= 2 * 1250
    drain(again)
    again.check_answers()
    assert [seq.kv.num_reused for seq in again.sequences.values()] == [5000, 5000]


def test_many_who_wait_for_one_block_have_it_read_once(disks: list[ToyDisk]):
    house = House(disks=disks, token_budget=50, max_running=10)
    for last in (0, 2, 3, 4):
        house.add([*PROMPT[:12], last, 1], max_tokens=2)
    house.check()
    assert house.toy.num_fetched == 3 * len(disks)


def test_who_decodes_goes_on_while_another_waits_for_its_blocks(disks: list[ToyDisk]):
    house = House(disks=disks, token_budget=8, num_groups=1)
    house.add([3], max_tokens=12)
    house.step()
    house.deliver()
    waiting = house.add(PROMPT, max_tokens=1)
    plans = []
    while not house.sequences[waiting].num_generated:
        plans.append(house.step())
        house.deliver()
    assert any(plan.slices for plan in plans if plan.fetches), "blocks are read by the steps of others"
    house.check()
    assert house.sequences[waiting].kv.num_reused == 12


def test_who_ends_while_its_blocks_are_read_leaves_them_to_others(disks: list[ToyDisk]):
    house = House(disks=disks, token_budget=100)
    gone = house.add(PROMPT, max_tokens=1)
    plan = house.plan()
    assert plan.fetches
    house.finish(gone, FinishReason.ABORT)
    assert ask(house) == len(PROMPT) - 1
    assert house.toy.num_fetched == 3 * len(disks)


def test_who_waits_for_its_blocks_has_a_place_among_those_that_run(disks: list[ToyDisk]):
    other = [4 - token for token in PROMPT]
    ask(House(disks=disks, token_budget=100), other)
    for disk in disks:
        disk.catch_up()
    house = House(disks=disks, token_budget=100, max_running=1)
    for prompt in (PROMPT, other):
        house.add(prompt, max_tokens=1)
    for _ in range(2):
        house.step()
        assert len(house.scheduler.prefix_cache.awaiting) == 1
    house.check()


def test_a_longer_last_block_takes_the_file_of_the_shorter(disks: list[ToyDisk]):
    house = House(disks=disks, token_budget=100)
    short = [kept.tokens for kept in kept_by_all(disks)]
    assert (PROMPT[-1],) in short
    ask(house, [*PROMPT, 2], max_tokens=1)
    for disk in disks:
        disk.catch_up()
    ask(house, [0], max_tokens=1)
    assert (PROMPT[-1],) not in [kept.tokens for kept in kept_by_all(disks)]
    assert (PROMPT[-1], 2) in [kept.tokens for kept in kept_by_all(disks)]


def test_a_tree_is_planted_from_its_files_in_any_order():
    whole = House(disks=[ToyDisk()], token_budget=100)
    for prompt in (PROMPT, [*PROMPT[:4], 0, 0, 0, 0, 2], [4, 4]):
        whole.add(prompt, max_tokens=1)
        whole.run()
    (disk,) = whole.disks
    disk.catch_up()
    kept = list(kept_by_all([disk]))
    for order in (kept, kept[::-1]):
        index = BlockTree(block=4)
        assert index.plant([*order, DiskBlock(b"nobody's", (1, 2))]) == []
        check_tree(index)
        assert {block.key for block in index} == {chained(one.parent, one.tokens) for one in kept}
    shorter = DiskBlock(kept[0].parent, kept[0].tokens[:2])
    assert BlockTree(block=4).plant([*kept, shorter]) == [chained(shorter.parent, shorter.tokens)]


def test_values_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="block 3 is to be read with positions 5 to 5"):
        Fetch(3, b"key", 5, 5)
    with pytest.raises(ValueError, match="block 3 of 4 tokens came with 2"):
        Save(3, 1, 0, 4, b"parent", (1, 2))


def test_answers_are_not_kept_where_prompts_are_packed():
    """The same tokens, once an answer and then part of a prompt, cross the links in two forms."""
    disks = [ToyDisk(), ToyDisk()]
    house = House(disks=disks, token_budget=100, prompts_only=True)
    first = house.add(PROMPT, max_tokens=9, session="a")
    house.run()
    assert [len(block.tokens) for block in house.scheduler.prefix_cache.tree] == [4, 4, 4, 1]
    assert ask(house, [*house.tokens(first), 3]) == len(PROMPT)


def test_a_request_that_begins_again_does_not_begin_with_its_answer():
    """Another has asked for what it answered; that KV is of a prompt."""
    house = House(token_budget=100, prompts_only=True)
    first = house.add(PROMPT, max_tokens=9)
    house.run()
    house.add([*house.tokens(first), 1], max_tokens=1)
    house.run()
    again = house.add(PROMPT, max_tokens=12)
    house.until(lambda: len(house.generated[again]) >= 8)
    house.scheduler._preempt(house.sequences[again])
    house.run()
    assert house.sequences[again].num_preemptions == 1
    assert house.sequences[again].kv.num_reused == len(PROMPT) - 1
    house.check_answers()


def test_a_state_behind_an_answer_is_not_kept_for_the_prompt():
    """It stands for all tokens so far, and where prompts are packed those of the answer are none of a prompt's."""
    prefix_cache = PrefixCache(PrefixCacheConfig(whole_blocks=True, prompts_only=True), KVBudget(block=4))
    seq = Sequence(1, [1, 2, 3, 4, 1, 1], SamplingParams(), 0)
    seq.tokens += [2, 3]
    seq.num_scheduled = 7
    prefix_cache.store_rest(seq, NOTHING)
    assert [(save.start, save.end) for save in prefix_cache.take_changes()[0]] == [(0, 4)]


def stored(prefix_cache: PrefixCache, token: int, session: str | None = None) -> set[int]:
    """The ids of the two blocks that a request of eight such tokens leaves."""
    seq = Sequence(token, [token] * 8, SamplingParams(), 0, session=session)
    seq.num_scheduled = 8
    prefix_cache.store_rest(seq, NOTHING)
    return {block.block_id for block in seq.kv.blocks}


def test_what_was_asked_once_is_evicted_before_an_open_conversation():
    budget = KVBudget((StageKV(6, 0, stored=1),), block=4)  # six blocks
    prefix_cache = PrefixCache(PrefixCacheConfig(), budget)
    opened, *once = (stored(prefix_cache, 1, "a"), stored(prefix_cache, 2), stored(prefix_cache, 3))
    once.append(stored(prefix_cache, 4))
    assert {block.block_id for block in prefix_cache.tree} == opened | once[1] | once[2]
    check_cache(prefix_cache)
    # Open ones do not take everything: the oldest of them makes room for what is new.
    new = [stored(prefix_cache, token, f"{token}") for token in (5, 6, 7)]
    assert {block.block_id for block in prefix_cache.tree} == set().union(*new)


def test_a_conversation_that_came_back_is_open():
    house = House(token_budget=100)
    first = house.add(PROMPT, max_tokens=4)
    house.run()
    again, further = house.add(PROMPT, max_tokens=4), house.add([*house.tokens(first), 1, 2], max_tokens=1)
    house.run()
    assert not house.sequences[again].comes_back
    assert house.sequences[further].comes_back
    assert len(house.scheduler.prefix_cache.sessions) == 1
    house.check_answers()


@pytest.mark.parametrize(
    ("names", "is_back", "kept"), [("abac", False, ["a", "c"]), (["a", None, None, None], True, ["a"])]
)
def test_the_sessions_that_were_used_last_are_remembered(names: list[str | None], is_back: bool, kept: list[str]):
    """Conversations without a name push no name out."""
    prefix_cache = PrefixCache(PrefixCacheConfig(max_sessions=2), KVBudget(block=4))
    for seq_id, name in enumerate(names, 1):
        seq = Sequence(seq_id, [seq_id, 2, 3], SamplingParams(), 0, session=name)
        seq.num_scheduled, seq.comes_back = 3, is_back
        prefix_cache.store_rest(seq, NOTHING)
    assert len(prefix_cache.sessions) == 2
    assert [name for name in prefix_cache.sessions if name in kept] == kept


@pytest.mark.parametrize(("num_blocks", "read"), [(16, [0, 0]), (13, [11, 7])])
def test_agents_come_back_to_what_they_had_and_nobody_else_reads_it(num_blocks: int, read: list[int]):
    """Two that share a beginning of eight tokens, and between their turns twelve who ask once. Where memory has no room
    for all of it, each agent's turn has what it lacks read from disk, and what both share is read for the first."""
    house = House(disks=[ToyDisk()], token_budget=100, kv=blocks(num_blocks))
    talks = [[1, 2, 3, 4, 4, 3, 2, 1, *[agent] * 4] for agent in (0, 2)]

    def turn(prompt: list[int]) -> tuple[list[int], int, int]:
        """The tokens then; of the prompt, those from stored blocks; and of these, those that were read."""
        seq_id, before = house.add(prompt, max_tokens=3), house.scheduler.prefix_cache.num_fetched
        house.run()
        house.disks[0].catch_up()
        house.check_answers()
        fetched = house.scheduler.prefix_cache.num_fetched - before
        return house.tokens(seq_id), house.sequences[seq_id].kv.num_reused, fetched

    for agent in (0, 1, 0, 1):
        talks[agent] = [*turn(talks[agent])[0], agent, agent]
    once = [turn([one % 5, one // 5, 0, 0, *[3] * 8])[1] for one in range(12)]
    assert max(once) < 4, "a block of somebody else's"
    found = [turn(talk)[1:] for talk in talks]
    assert found == [(len(talk) - 3, fetched) for talk, fetched in zip(talks, read, strict=True)], "all but what is new"
