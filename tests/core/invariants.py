"""Invariants of a scheduler, and of what it consists of, between any two events."""

from collections.abc import Iterable
from copy import deepcopy

from splitinfer.core.kv.block_tree import BlockTree
from splitinfer.core.kv.budget import NOTHING
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.scheduler.kv_manager import KVManager
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence


def check(scheduler: Scheduler) -> None:
    """Assert every invariant.

    Raises:
        AssertionError: one does not hold; the scheduler has a bug.
    """
    _check_places(scheduler)
    _check_plans(scheduler)
    check_kv(scheduler.kv, scheduler.running.values())
    check_batches(scheduler.batches)
    for seq in scheduler.running.values():
        _check_running(scheduler, seq)
    assert scheduler.in_flight or scheduler.is_idle or deepcopy(scheduler).schedule(), "a sequence waits for ever"


def _check_places(scheduler: Scheduler) -> None:
    ids = [seq.seq_id for seq in (*scheduler.waiting, *scheduler.running.values())]
    assert len(ids) == len(set(ids)), "a sequence is in two places"
    assert len(scheduler.running) <= scheduler.config.max_running
    assert len(scheduler.waiting) <= scheduler.config.max_waiting + scheduler.config.max_running
    assert not set(scheduler.kv.freed) & set(ids), "a sequence that has not ended is to be freed"
    members = {seq.seq_id for group in scheduler.batches._groups for seq in group}
    assert members <= set(scheduler.running), "a sequence decodes that does not run"
    for seq in scheduler.waiting:
        assert not any((seq.num_scheduled, seq.num_in_flight, seq.is_known, seq.kv_tokens)), "a waiting sequence has KV"
        assert seq.finish_reason is None
    alive = (*scheduler.waiting, *scheduler.running.values())
    assert scheduler.deadlines.next == min((s.deadline for s in alive if s.deadline is not None), default=None)


def _check_plans(scheduler: Scheduler) -> None:
    assert len(scheduler.in_flight) <= max(scheduler.config.max_in_flight, scheduler.config.num_groups)
    for plan in (step.plan for step in scheduler.in_flight):
        assert plan.num_tokens <= scheduler.config.token_budget, "a step is too large"
        assert len({part.seq_id for part in plan.slices}) == len(plan.slices), "two slices of one sequence"


def _check_running(scheduler: Scheduler, seq: Sequence) -> None:
    assert 0 <= seq.kv.num_reused <= seq.num_scheduled <= len(seq.tokens) + len(seq.drafts.ahead)
    assert seq.finish_reason is None
    in_plans = sum(part.seq_id == seq.seq_id for step in scheduler.in_flight for part in step.plan.slices)
    assert seq.num_in_flight == in_plans
    assert 0 <= seq.num_awaited <= seq.num_in_flight
    if seq in scheduler.batches:
        assert seq.num_awaited <= 1 or scheduler.config.speculates, "a sequence decodes twice at a time"
        assert seq.num_to_compute == int(not seq.num_awaited), "a token was computed twice or got lost"
        assert not seq.drafts.ahead or seq.num_scheduled == len(seq.tokens) + len(seq.drafts.ahead), "a draft got lost"
        assert seq.num_streamed < scheduler.config.longest(seq) or not seq.drafts.ahead
    else:
        assert not seq.drafts.waiting
        assert not seq.drafts.ahead or (seq.num_awaited and seq.num_scheduled == seq.num_streamed)


def check_kv(kv: KVManager, running: Iterable[Sequence]) -> None:
    check_cache(kv.cache)
    use = NOTHING
    for seq in running:
        use += kv.budget.use_of(seq.kv_tokens)
    assert use == kv.used, f"{kv.used} is counted, {use} is used"
    assert kv.budget.fits(use + kv.stored), "more KV is used than there is"
    kept = kv.retained
    is_beside = kept is not None and (use != NOTHING or kept.seq_id in kv.freed)
    assert not is_beside, "an ended sequence keeps its KV beside one that runs"
    assert set(kv._newly_retained) <= ({kept.seq_id} if kept is not None else set())
    assert len(kv.freed) == len(set(kv.freed)), "a sequence is to be freed twice"


def check_batches(batches: MicroBatches) -> None:
    ids = [seq.seq_id for group in batches._groups for seq in group]
    assert len(ids) == len(set(ids)), "a sequence is in two groups"
    assert set(ids) == set(batches._id_to_group)
    assert all(batches._id_to_group[seq.seq_id] == i for i, group in enumerate(batches._groups) for seq in group)
    assert batches._next_to_move() is None, "groups are unequal, and a sequence could move"


def check_cache(cache: PrefixCache) -> None:
    check_tree(cache.tree)
    check_tree(cache.disk)
    assert len(cache.sessions) <= cache._config.max_sessions
    for seq in cache.awaiting.values():
        assert seq.kv.awaits, "a sequence waits for nothing"
        assert all(block.is_here and block.is_coming for block in seq.kv.awaits)


def check_tree(tree: BlockTree) -> None:
    for block in tree:
        assert block.is_here
        assert 0 < len(block.tokens) <= tree._block
        assert block in tree._siblings(block)
        assert block.is_full or not block.children
        assert block.num_children == sum(map(len, block.children.values()))
        if block.parent is not None:
            assert block.parent.is_full
            assert block.parent.end == block.start
            assert tree._blocks[block.parent.block_id] is block.parent
    assert {block.key: block for block in tree} == tree._by_key
    roots = [block for block in tree if block.parent is None]
    assert sum(map(len, tree._first.values())) == len(roots)
    assert tree._leaves == sorted((one.last_use, one.block_id) for one in tree if not one.children)
