"""How many groups decode in turn, and which of their members get drafts: chosen again where that is due."""

from dataclasses import replace

from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.grouping import Member


def regroup(state: SchedulerState) -> None:
    """Choose groups and drafts again where that is due, and move members."""
    groups, speculation = state.groups, state.speculation
    members = state.batches.by_id()
    active = None
    if len(members) < 2:
        groups.forget()
        active = groups.most_groups
    elif groups.is_due(frozenset(members)):
        asked = {seq_id: _member(state, seq) for seq_id, seq in members.items()}
        objective = state.config.policy_config.itl_slo
        position = sum(len(seq.tokens) for seq in members.values()) // len(members)
        groups.choose(asked, objective, position, has_drafter=state.config.speculates)
        active = groups.most_groups if groups.choice is None else groups.choice.groups
    if speculation is not None:
        speculation.are_several = len(members) > 1
    state.batches.balance(active)


def _member(state: SchedulerState, seq: Sequence) -> Member:
    """A sequence as the choice of groups sees it."""
    speculation = state.speculation if state.config.speculates else None
    member = Member(0.0, 0) if speculation is None else speculation.member(seq)
    num_chosen = seq.num_generated - seq.drafts.num_forced - seq.drafts.num_right
    return replace(member, forced=seq.drafts.num_forced / max(1, num_chosen))
