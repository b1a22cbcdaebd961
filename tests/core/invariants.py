"""Invariants of a scheduler between any two events. Tests, and simulations under test, check them after each event."""

from copy import deepcopy

from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence


def check(scheduler: Scheduler) -> None:
    """Assert every invariant.

    Raises:
        AssertionError: one does not hold; the scheduler has a bug.
    """
    _check_places(scheduler)
    _check_plans(scheduler)
    scheduler.kv.check(scheduler.running.values())
    scheduler.batches.check()
    for seq in scheduler.running.values():
        _check_running(scheduler, seq)
    assert scheduler.in_flight or scheduler.is_idle or deepcopy(scheduler).schedule(), "a sequence waits for ever"


def _check_places(scheduler: Scheduler) -> None:
    ids = [seq.seq_id for seq in (*scheduler.waiting, *scheduler.running.values())]
    assert len(ids) == len(set(ids)), "a sequence is in two places"
    assert len(scheduler.running) <= scheduler.config.max_running
    assert len(scheduler.waiting) <= scheduler.config.max_waiting + scheduler.config.max_running
    assert not set(scheduler.kv.freed) & set(ids), "a sequence that has not ended is to be freed"
    members = {seq.seq_id for group in scheduler.batches.groups for seq in group}
    assert members <= set(scheduler.running), "a sequence decodes that does not run"
    for seq in scheduler.waiting:
        assert not any((seq.num_scheduled, seq.num_in_flight, seq.is_known, seq.kv_tokens)), "a waiting sequence has KV"
        assert seq.finish_reason is None
    alive = (*scheduler.waiting, *scheduler.running.values())
    assert scheduler.next_deadline == min((s.deadline for s in alive if s.deadline is not None), default=None)


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
        assert seq.num_awaited <= 1 or scheduler.speculation is not None, "a sequence decodes twice at a time"
        assert seq.num_to_compute == int(not seq.num_awaited), "a token was computed twice or got lost"
        assert not seq.drafts.ahead or seq.num_scheduled == len(seq.tokens) + len(seq.drafts.ahead), "a draft got lost"
        assert seq.num_streamed < scheduler.config.longest(seq) or not seq.drafts.ahead
    else:
        assert not seq.drafts.waiting
        assert not seq.drafts.ahead or (seq.num_awaited and seq.num_scheduled == seq.num_streamed)
