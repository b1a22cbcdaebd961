"""Decides what the next plan does, and changes nothing: asking whether there is one and making it are one computation.

A step is

    [ every member of one group: one token each, and drafts | chunks of prompts, with what is left of token_budget ]

The policy decides whether the decodes go, how much of the room prompts may take, and whether waiting requests may be
admitted (``core.scheduler.policy``); an objective for the time between tokens bounds the room by what steps have cost
(``core.costs``). KV is allocated by rank, so no sequence takes what one of higher rank lacks.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from splitinfer.core.costs.model import most_rows, quickest_size
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.budget import NOTHING
from splitinfer.core.picture import chunk_end
from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.scheduler.decision import Candidate, Decision
from splitinfer.core.scheduler.microbatches import even_share
from splitinfer.core.scheduler.policy import PolicyDecision, PolicyInput, longest_chunk
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.speculation import Proposal

_MOST_SCORED = 64  # rows of prompts in a step whose logits are computed: five arrays of 39 MB at 152,000 tokens
OPENED_FIRST = 1024  # tokens of stored KV that take longer to copy than a step without slices takes
_LEAST_CHUNK = 8  # prompt tokens in a step, whatever the options say; else a prompt would never be read


class StepPlanner:
    """Plans steps. Reads a scheduler's state and changes nothing."""

    def __init__(self, state: SchedulerState, admission: AdmissionControl) -> None:
        self._state, self._admission = state, admission

    def decide(self) -> Decision | None:
        """Return what the next plan does; ``None`` where there is nothing to do or no stage could take it."""
        if self._state.is_full:
            return None
        has_prompts = bool(self._state.waiting) or self._state.reads_prompts
        for group in self._groups_in_turn():
            if self._state.batches.may_go(group, alone=has_prompts):
                decision = self._decide_for(group)
                if decision.does_something:
                    return self._opened_first(decision)
        further = self._further_blocks() if self._state.speculates else None
        if further is not None:
            return further
        # Freed sequences, saves and fetches go with the next slices; alone only where no slices will follow.
        will_come = self._state.running and self._state.in_flight
        return Decision(self._state.allocation()) if self._state.has_changes and not will_come else None

    def _opened_first(self, decision: Decision) -> Decision:
        """The same, or only its admissions, in an idle pipeline: all stages copy the stored KV that the sequences begin
        with at the same time. With the first chunk, each stage would do it when the stages before it are done."""
        copying = (new for new in decision.admissions if self._state.left_for(new) is None)
        stored = max((new.match.num_tokens for new in copying), default=0)
        is_alone = (self._state.config.num_stages or self._state.config.num_groups) == 1
        if stored < OPENED_FIRST or is_alone or self._state.running or self._state.in_flight:
            return decision
        return Decision(decision.allocation, admissions=decision.admissions, fetching=decision.fetching)

    def _groups_in_turn(self) -> list[int]:
        """All groups in the order in which they go: first the one that drafts wait for, then by turn."""
        batches = self._state.batches
        if not self._state.speculates:
            return list(batches.in_turn())
        have = {group for group in batches.in_turn() if any(seq.drafts.waiting for seq in batches.members(group))}
        return sorted(batches.in_turn(), key=lambda group: group not in have)

    def _keeps_decodes_waiting(self, group: int) -> bool:
        """Whether prompts go before the decodes of a group now."""
        return self._state.reads_prompts and not self._state.policy.decide(self._state.policy_input(group)).decodes_go

    def _decide_for(self, group: int) -> Decision:
        """The step of one group, by the policy."""
        situation = self._state.policy_input(group)
        rules = self._state.policy.decide(situation)
        decision = self._filled(group, rules, situation)
        if decision.has_slices or (rules.decodes_go and not self._state.batches.members(group)):
            return decision
        # No prompt can be read now; or no decode has KV, and their rows are free for a prompt that has.
        return self._filled(group, rules._replace(decodes_go=not rules.decodes_go), situation)

    def _filled(self, group: int, rules: PolicyDecision, situation: PolicyInput) -> Decision:
        """Fill a step with the group's decodes, if they go, then with chunks, as far as tokens and KV allow."""
        decision = Decision(self._state.allocation(), group, situation)
        members = self._state.batches.members(group)
        going = members if rules.decodes_go else []
        if rules.admits:
            decision.admissions = list(self._admission.of(decision))
        candidates = [*self._ready(), *(new.candidate for new in decision.admissions)]
        prompts = [one for one in candidates if not one.decodes]
        most = self._room_for_prompts(rules, going, prompts, situation) if prompts else 0
        budget = self._state.config.token_budget
        # The largest group determines how many tokens every step of the round has left.
        left = max(budget - self._state.batches.largest, self._state.config.min_chunk) if rules.decodes_go else most
        self._set_share(decision, prompts, min(most, left))
        least = self._state.config.min_chunk if len(self._state.batches) else 0
        granted = self._allocate(decision, candidates, min(most, max(decision.share, least)))
        # Cut after allocating KV: a sequence that lacks it must not take the place of one that could go.
        able = [seq for seq in going if seq.seq_id in granted]
        count = sum(total <= budget for total in accumulate(seq.num_to_compute for seq in able))
        decision.decodes, decision.late = able[:count], able[count:]
        # Without a slice, an admitted sequence would hold blocks that could be evicted before their first use.
        begin = {seq.seq_id for seq, _ in decision.chunks}
        decision.admissions = [new for new in decision.admissions if new.seq.seq_id in begin]
        if self._state.speculates:
            self._add_drafts(decision)
            self._add_forced(decision)
        return decision

    def _further_blocks(self) -> Decision | None:
        """A step of a group that has steps under way: drafts behind its members' blocks, and the first blocks of those
        whose blocks under way are void."""
        for group in self._groups_in_turn():
            decision = Decision(self._state.allocation(), group, self._state.policy_input(group))
            for seq in sorted(self._state.batches.going_on(group, self._follows), key=lambda one: one.rank):
                if decision.allocation.is_preempted(seq):
                    continue  # for one before it in this loop
                if seq.num_awaited or decision.allocation.allocate(seq, seq.kv_tokens, seq.num_scheduled + 1):
                    decision.decodes.append(seq)
            rows = accumulate(seq.num_to_compute for seq in decision.decodes)
            decision.decodes = decision.decodes[: sum(total <= self._state.config.token_budget for total in rows)]
            self._add_drafts(decision)
            decision.decodes = [seq for seq in decision.decodes if seq.num_to_compute or seq.seq_id in decision.drafts]
            if decision.decodes:
                return decision
        return None

    def _follows(self, seq: Sequence) -> bool:
        """Whether a block that waits may go behind those of its sequence that are under way."""
        assert self._state.speculation is not None
        return bool(seq.drafts.waiting) and self._state.speculation.may_follow(seq)

    def proposals(self) -> list[Proposal]:
        """The drafts that the next plan could contain, for each of its sequences that gets some."""
        assert self._state.speculation is not None
        order = self._groups_in_turn()
        for group in order:
            members = self._state.batches.members(group)
            if members and not self._state.batches.is_in_flight(group):
                return [] if self._keeps_decodes_waiting(group) else self._proposals_of(members)
        if self._state.reads_prompts:
            return []
        for group in order:
            if found := self._proposals_of(self._state.batches.going_on(group, self._state.speculation.may_follow)):
                return found
        return []

    def _proposals_of(self, members: list[Sequence]) -> list[Proposal]:
        """Those for sequences of one step, as far as it has room: half of it is a prompt's while one is read."""
        assert self._state.speculation is not None
        room = self._state.config.token_budget - sum(seq.num_to_compute for seq in members)
        room = room // 2 if self._state.reads_prompts else room
        found = list[Proposal]()
        for seq in members:
            ask = self._state.speculation.further if seq.num_awaited else self._state.speculation.first
            proposal = ask(seq, self._state.config.longest(seq))
            if proposal is not None and room > 0:
                found.append(proposal if proposal.count <= room else replace(proposal, count=room))
                room -= found[-1].count
        return found

    def _add_drafts(self, decision: Decision) -> None:
        """Add the drafts that wait, as far as there is room, and memory without eviction or preemption: of this step's
        sequences, and of those whose next token will need a place in theirs."""
        drafted = [seq for seq in decision.decodes if seq.drafts.waiting]
        if not drafted:
            return
        room = self._state.config.token_budget - decision.num_tokens
        taken = {seq.seq_id for seq in decision.decodes}
        others = [one for one in self._state.running.values() if one.seq_id not in taken]
        kv = self._state.budget
        reserve = sum((kv.growth(one.kv_tokens, len(one.tokens) + 1) for one in others if one.num_awaited), NOTHING)
        for seq in sorted(drafted, key=lambda one: one.rank):
            end = max(seq.num_scheduled, len(seq.tokens))
            for count in range(min(len(seq.drafts.waiting), room), 0, -1):
                if decision.allocation.allocate_spare(seq.kv_tokens, end + count, reserve):
                    decision.drafts[seq.seq_id] = count
                    room -= count
                    break

    def _add_forced(self, decision: Decision) -> None:
        """Add the tokens that must follow the prompts that end in this step, as far as there is room, and memory
        without eviction or preemption."""
        assert self._state.speculation is not None
        room = self._state.config.token_budget - decision.num_tokens
        starts = {new.seq.seq_id: new.match.num_tokens for new in decision.admissions}
        for seq, size in decision.chunks:
            end = len(seq.tokens)
            if seq.rules is None or starts.get(seq.seq_id, seq.num_scheduled) + size < end:
                continue
            forced = list(self._state.speculation.opening(seq, self._state.config.longest(seq))[:room])
            while forced and not decision.allocation.allocate_spare(end, end + len(forced)):
                forced.pop()
            if forced:
                decision.forced.append((seq, forced))
                decision.drafts[seq.seq_id] = len(forced)
                room -= len(forced)

    def _ready(self) -> Iterator[Candidate]:
        """Running sequences with tokens to compute, of all groups: lower ranks must not take the KV they need next."""
        for seq in self._state.running.values():
            if seq.num_to_compute > 0:  # a decode in flight has nothing to compute until its token comes
                yield Candidate(seq, seq.num_scheduled, seq.kv_tokens, seq in self._state.batches)

    def _room_for_prompts(
        self, rules: PolicyDecision, going: list[Sequence], prompts: list[Candidate], situation: PolicyInput
    ) -> int:
        """Prompt tokens that a step may contain beside the decodes that go."""
        rows = [max(1, seq.num_to_compute) + len(seq.drafts.waiting) for seq in going]
        room = self._state.config.token_budget - sum(rows)
        objective = self._state.config.policy_config.itl_slo
        if rules.share < 1:
            room = min(room, max(int(rules.share * room), _LEAST_CHUNK))
        if objective is None or not rules.decodes_go or not situation.num_decoding:
            return room
        decodes = Shape()
        for seq, count in zip(going, rows, strict=True):
            decodes = decodes.plus(seq.num_scheduled, count)
        groups = self._state.config.num_groups
        if self._state.prompts_go_on < groups:
            # Decodes that had short steps so far now wait for one long step more than there are groups.
            objective *= groups / (groups + 1)
        first = min(prompts, key=lambda one: one.seq.rank)
        return min(room, most_rows(self._state.costs, decodes, first.start, room, groups, objective))

    def _set_share(self, decision: Decision, prompts: list[Candidate], most: int) -> None:
        """Set the share of prompts in each step. It stays for a round, or for a prompt while no sequence decodes, so
        that the steps are equal: shorter ones behind long ones would wait for a place. An admission ends it."""
        if self._state.share_left and not decision.admissions:
            decision.share, decision.share_left = self._state.share, self._state.share_left - 1
            return
        config, rounds, remaining = self._state.config, len(self._state.batches) > 0, sum(one.left for one in prompts)
        most = max(most, 1)
        share = even_share(remaining, most, config.num_groups, rounds=rounds, least=config.min_chunk)
        if remaining and not rounds and not config.blocks.whole_blocks:
            first = min(prompts, key=lambda one: one.seq.rank)
            share = quickest_size(self._state.costs, first.start, remaining, most, share)
        steps = config.num_groups if rounds else -(-remaining // max(share, 1))
        decision.share, decision.share_left = share, max(steps - 1, 0)

    def _allocate(self, decision: Decision, candidates: list[Candidate], room: int) -> set[int]:
        """Allocate KV by rank and cut chunks; returns the ids of the sequences that may decode."""
        granted: set[int] = set()
        quota, room_to_score = self._quota(candidates, room), _MOST_SCORED
        for one in sorted(candidates, key=lambda one: one.seq.rank):
            if decision.allocation.is_preempted(one.seq):
                continue
            if one.decodes:
                if decision.allocation.allocate(one.seq, one.kv_tokens, one.start + 1):
                    granted.add(one.seq.seq_id)
                continue
            size = min(one.left, room, quota, longest_chunk(one.start, self._state.config.token_budget))
            if size < min(one.left, self._state.config.min_chunk) and decision.chunks:
                room = 0  # a small chunk of a further prompt costs more than it saves
            if one.seq.num_to_score:
                size = min(size, room_to_score)
            if room <= 0 or size <= 0:
                continue
            size = self._cut(one, size)
            if not decision.allocation.allocate(one.seq, one.kv_tokens, one.start + size):
                room = 0  # lower ranks must not take what this one lacks
                continue
            decision.chunks.append((one.seq, size))
            room, room_to_score = room - size, room_to_score - size * bool(one.seq.num_to_score)
        return granted

    def _cut(self, one: Candidate, size: int) -> int:
        """The size of a chunk that may end there."""
        if self._state.config.blocks.whole_blocks:
            block = self._state.budget.block
            size = min(size, block - one.start % block)  # what is stored is the state at the block's end
        return chunk_end(one.seq.pictures, one.start, one.start + size) - one.start

    def _quota(self, candidates: list[Candidate], room: int) -> int:
        """Tokens that one prompt may have in a step: ``room``, or its part where several are read side by side."""
        side_by_side = min(
            self._state.config.policy_config.max_partial_prefills, sum(not one.decodes for one in candidates)
        )
        return max(room // side_by_side, _LEAST_CHUNK) if side_by_side > 1 else room
