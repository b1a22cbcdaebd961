"""Decides what every stage does next: events in, plans out.

The life of a sequence: ``add`` queues it; ``schedule`` admits it when there is room and cuts its tokens still to
compute into slices; ``update`` takes what the last stage sampled and appends it, so there is one more token to
compute; ``finish`` (or an end token, or a full length) ends it; its KV is freed by the next plan.

What was computed once is kept, block by block, for whoever begins with the same tokens (``core.kv.prefix_cache``). A
block is saved by the plan after the one that completes it, before anything else happens in that plan, so every later
plan may begin a sequence with it. Somebody whose next block is just being computed by another, or read from disk, waits
for it.

A running sequence reads its prompt or decodes. Chunks of a prompt need no result of each other, so they go in
consecutive steps that are all in flight; a decode waits for the last token. Whoever has its first token joins a
group (``core.scheduler.microbatches``), and a step is

    [ every member of one group, one token each | chunks of prompts, with what is left of token_budget ]

so no decode is ever skipped for a prompt, and none waits longer than one step of bounded size per stage. That is the
default; other policies (``core.scheduler.policy``) let prompts go first, or keep newcomers out, and the room for
prompts may follow an objective for the time between tokens, by what steps have cost so far
(``core.scheduler.cost_model``). While somebody decodes, as many plans are under way as there are groups: one more would
only stand in front of the next decode. While nobody does, ``max_in_flight`` keep a plan waiting in front of each stage.

Where fewer requests run than there are stages, drafts fill what would be idle (``core.speculation.speculation``):
``wish`` says how many and for whom, ``take`` brings them, and the next plan holds them. A decode is then a block, and
blocks of one sequence follow each other without waiting for results; a result that voids them lets the next one begin
at once.

KV is bounded (``core.kv.budget``). A sequence is admitted when its whole prompt and the beginning of its answer
fit beside what all others have or were promised. Where growing answers fill the memory nevertheless, the ledger
(``core.scheduler.kv_allocation``) says who gives up its KV: that sequence waits, keeps its tokens, and is computed
again later. A token's random key depends on its position alone, so nobody can see from the tokens that it happened.

``_decide`` computes what the next plan would do and changes nothing; ``can_schedule`` asks it, ``schedule``
carries it out.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat

from splitinfer.core.kv.block_tree import DiskBlock, full_keys
from splitinfer.core.kv.budget import BLOCK, NOTHING, KVBudget, KVUse, growth, use_of
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.kv.rewind import UNLIMITED
from splitinfer.core.plan import NewSequence, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.scheduler import invariants
from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.cost_model import CostModel, Shape, most_rows
from splitinfer.core.scheduler.decision import Admission, Candidate, Decision
from splitinfer.core.scheduler.kv_allocation import KVAllocation
from splitinfer.core.scheduler.microbatches import MIN_CHUNK, MicroBatches, even_share
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyDecision, PolicyInput, policy_of
from splitinfer.core.scheduler.waiting_queue import Deadlines, QueueFull, WaitingQueue
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.speculation import Speculation, Wish

_LEAST_CHUNK = 8  # tokens of a prompt in a step, whatever the dials say: or it would never be read


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, and whether the sequence ends with it."""

    seq_id: int
    token: SampledToken
    finish_reason: FinishReason | None


class Scheduler:
    """Pure: no clock, no threads, no arrays. ``check`` states what must always hold.

    ``costs``: what is known of the stages before any step; it learns with each.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self.batches = MicroBatches(config.num_groups)
        self._budget = config.kv or KVBudget()
        self.prefix_cache = PrefixCache(config.blocks, self._budget)
        num_stages = config.num_stages or config.num_groups
        self.speculation = Speculation(num_stages, config.rewind) if config.speculates else None
        self.costs = costs or CostModel.of(num_stages)
        self.policy = policy_of(config.policy_config)
        self._admission = AdmissionControl(
            config, self.waiting, self.running, self.batches, self.prefix_cache, self.costs
        )
        self._now = 0.0  # the latest time that anybody has told
        self._used = NOTHING  # by all that run
        self.num_preemptions = 0  # times a running sequence gave up its KV
        self._deadlines = Deadlines()
        self._freed: list[int] = []
        self._plans: deque[StepPlan] = deque()  # under way, oldest first
        self._next_step = 0
        self._num_arrived = 0
        self._prompts_go_on = 0  # consecutive steps with prompts in them
        self._share, self._share_left = 0, 0  # prompt tokens for each step of this round; steps it has left

    # -- events in ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: ``max_waiting`` wait already.
            NeverFits: its KV is too large for a stage even when alone.
        """
        if not self.has_room:
            raise QueueFull(f"{len(self.waiting)} requests wait already, and no more may")
        self.config.check_fits(seq)
        seq.arrival = self._num_arrived
        if self.config.blocks.keeps_blocks:
            seq.keys = full_keys(self.config.blocks.root, seq.tokens)
        self._num_arrived += 1
        self.waiting.add(seq)
        self._deadlines.add(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence from outside (abort, a stop string). False if it is not here any more.

        What is under way for it still runs and is ignored; its KV goes with the next plan.
        """
        seq = self.running.get(seq_id) or self.waiting.get(seq_id)
        if seq is None:
            return False
        self._end(seq, reason)
        self.batches.balance()
        return True

    def expire(self, now: float) -> list[int]:
        """End every sequence whose deadline is over (``ABORT``); their ids. ``now``: seconds on the caller's clock."""
        seq_ids = self._deadlines.over(now)
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ABORT)
        return seq_ids

    def update(self, result: StepResult, heard: float = 0.0) -> list[TokenEvent]:
        """Learn what came of the oldest plan under way. ``heard``: when, in seconds on the first stage's clock.

        Raises:
            ValueError: a result that does not answer that plan; the pipeline keeps order, so this
                is a broken peer.
        """
        plan = self._take_plan(result)
        self._now = max(self._now, heard)
        sampled = {s.seq_id: s.tokens for s in result.sampled}
        events: list[TokenEvent] = []
        newcomers: list[Sequence] = []
        for part in plan.slices:
            seq = self.running.get(part.seq_id)
            if seq is None:
                continue  # it ended while this step was under way
            seq.num_in_flight -= 1
            events += self._append(seq, part, sampled.get(part.seq_id, ()))
            if part.num_logits and seq.finish_reason is None and seq not in self.batches:
                newcomers.append(seq)
        for seq in newcomers:  # after the endings, so that they fill the places
            self.batches.join(seq)
        self.batches.balance()
        self.prefix_cache.learn(plan, result.figures)
        if plan.slices:
            self.costs.learn(plan.slices, result.figures, heard)
        if self.speculation is not None:
            self.speculation.measured(plan, result, heard)
        return events

    def replay(self, kept: Iterable[DiskBlock] = ()) -> None:
        """The stages have forgotten everything but what is ``kept`` on their disks: bring every running sequence's
        KV back from its tokens.

        Nothing that was sampled is lost or sampled twice: tokens are here, and those still to come depend
        on nothing else.
        """
        self._plans.clear()
        self._freed.clear()
        self.prefix_cache.clear(kept)
        self.batches.clear()
        self._used, self._share_left = NOTHING, 0
        for seq in self.running.values():
            self._forget_drafts(seq)
            seq.forget_stages()
            self.waiting.add(seq)
        self.running.clear()

    def drop(self, session: str) -> None:
        """Forget a session: the KV that nobody else begins with is freed by the next plan."""
        self.prefix_cache.forget(session)

    def tune(self, policy_config: PolicyConfig, token_budget: int, max_running: int) -> None:
        """Go by other rules from the next plan on; who runs already goes on."""
        self.config = replace(
            self.config, policy_config=policy_config, token_budget=token_budget, max_running=max_running
        )
        self._admission = replace(self._admission, config=self.config)
        self.policy = policy_of(policy_config)
        self._share_left = 0

    # -- drafts ------------------------------------------------------------------------------

    def wish(self) -> Wish | None:
        """Drafts that the next plan could hold; they come by ``take``, before the next ``schedule``. Asking again is
        no harm."""
        if not self._speculates or len(self._plans) >= self._limit:
            return None
        for group in self.batches.in_turn():
            members = self.batches.members(group)
            if members and not self.batches.is_in_flight(group):
                return self._wish_of(members[0], first=True)
        wishes = (self._wish_of(seq, first=False) for group in self.batches.groups for seq in group)
        return next((wish for wish in wishes if wish is not None), None)

    def take(self, wish: Wish) -> None:
        """What came of a wish; fewer drafts than were wished for, or none, is no error. Results may have come since."""
        if self.speculation is not None and self.running.get(wish.seq.seq_id) is wish.seq:
            self.speculation.take(wish)

    @property
    def drafts_next(self) -> Sequence | None:
        """For whom drafts are likely to be wished next, so that a drafter can read its prompt."""
        if self.speculation is None or not self.speculation.has_room(len(self.running) + len(self.waiting)):
            return None
        return next(iter(self.running.values()), None)

    def still_wanted(self, plan: StepPlan) -> StepPlan:
        """The newest plan, which has not left the first stage, without what a result has voided since it was made."""
        if not self._plans or self._plans[-1] is not plan:
            return plan  # a sequence in it may have been planned anew
        void = [part for part in plan.slices if part.begins_with_draft and self._is_void(part)]
        if not void:
            return plan
        for part in void:
            self.running[part.seq_id].num_in_flight -= 1
            if self.speculation is not None:
                self.speculation.counts.unsent += 1
        self._plans[-1] = replace(plan, slices=tuple(part for part in plan.slices if part not in void))
        return self._plans[-1]

    def _is_void(self, part: Slice) -> bool:
        seq = self.running.get(part.seq_id)
        return seq is not None and not seq.num_awaited

    def _wish_of(self, seq: Sequence, *, first: bool) -> Wish | None:
        assert self.speculation is not None
        ask = self.speculation.first if first else self.speculation.further
        wish = ask(seq, self.config.longest(seq))
        room = self.config.token_budget - seq.num_to_compute
        if wish is None or room <= 0:
            return None
        return wish if wish.count <= room else replace(wish, count=room)

    @property
    def _speculates(self) -> bool:
        """Whether drafts would find an idle stage."""
        if self.speculation is None or not self.speculation.has_room(len(self.running) + len(self.waiting)):
            return False
        return not any(seq.num_to_compute and seq not in self.batches for seq in self.running.values())

    # -- plans out ---------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan, or ``None`` when there is nothing to do or no stage could take it.

        ``now``: seconds on the first stage's clock. What goes into a plan may depend on it, whether there is one does
        not.
        """
        self._now = max(self._now, now)
        decision = self._decide()
        return None if decision is None else self._carry_out(decision)

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` would return a plan now."""
        return self._decide() is not None

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        return len(self.waiting) < self.config.max_waiting

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` will end a sequence, in seconds on the caller's clock; ``None``: not at all."""
        return self._deadlines.next

    @property
    def num_in_flight(self) -> int:
        """Plans under way."""
        return len(self._plans)

    @property
    def kv_used(self) -> KVUse:
        """The KV of all that run."""
        return self._used

    @property
    def kv_stored(self) -> KVUse:
        """The KV that is kept for others."""
        return self.prefix_cache.use

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits, or is still to be freed."""
        return not (self.waiting or self.running or self._plans or self._has_changes)

    # -- deciding ----------------------------------------------------------------------------

    def _decide(self) -> Decision | None:
        """What the next plan does. Changes nothing."""
        if len(self._plans) >= self._limit:
            return None
        for group in self.batches.in_turn():
            if not self.batches.is_in_flight(group):
                decision = self._decide_for(group)
                if decision.does_something:
                    return decision
        further = self._further_block() if self._speculates else None
        if further is not None:
            return further
        # What is freed, saved or fetched travels with the next slices, and alone only where none will come.
        will_come = self.running and self._plans
        return Decision(self._allocation()) if self._has_changes and not will_come else None

    @property
    def _has_changes(self) -> bool:
        """Whether the stages have something to do even without slices."""
        return bool(self._freed) or self.prefix_cache.has_changes

    @property
    def _limit(self) -> int:
        """Plans that may be under way now."""
        most = self.config.max_in_flight
        return min(most, self.config.num_groups) if self._num_decoding else most

    @property
    def _num_decoding(self) -> int:
        """Who decodes, or will as soon as a result is here: the steps behind it stand in front of its next token."""
        joining = (seq not in self.batches and not seq.num_to_compute for seq in self.running.values())
        return len(self.batches) + sum(joining)

    def _policy_input(self, group: int) -> PolicyInput:
        share = self._budget.share(self._used)
        waited = max((self._now - seq.token_at for seq in self.batches.members(group)), default=0.0)
        return PolicyInput(self._num_decoding, share, waited)

    def _allocation(self) -> KVAllocation:
        prefix_cache = self.prefix_cache
        used = self._used + prefix_cache.use
        return KVAllocation(
            self._budget, used, prefix_cache.tree.evictable(), self.running.values(), prefix_cache.pinned
        )

    def _decide_for(self, group: int) -> Decision:
        """The step of one group, as the policy has it."""
        decide = self.policy.decide(self._policy_input(group))
        decision = self._filled(group, decide)
        if decide.decodes_go or decision.chunks:
            return decision
        return self._filled(group, decide._replace(decodes_go=True))  # no prompt can be read now

    def _filled(self, group: int, decide: PolicyDecision) -> Decision:
        """Its decodes if they go, then chunks, as far as there are tokens and KV for them."""
        decision = Decision(self._allocation(), group)
        members = self.batches.members(group)
        going = members if decide.decodes_go else []
        if decide.admits:
            decision.admissions = list(self._admission.of(decision))
        candidates = [*self._ready(), *(new.candidate for new in decision.admissions)]
        prompts = [one for one in candidates if not one.decodes]
        most = self._room_for_prompts(decide, going, prompts) if prompts else 0
        # The largest group says how many tokens every step of the round has left.
        left = max(self.config.token_budget - self.batches.largest, MIN_CHUNK) if decide.decodes_go else most
        self._set_share(decision, sum(one.left for one in prompts), min(most, left))
        budget = self.config.token_budget
        granted = self._allocate(decision, candidates, min(most, max(decision.share, MIN_CHUNK)))
        # Cut after asking for KV: who lacks it must not take the place of one that could go.
        able = [seq for seq in going if seq.seq_id in granted]
        count = sum(total <= budget for total in accumulate(seq.num_to_compute for seq in able))
        decision.decodes, decision.late = able[:count], able[count:]
        begin = {
            seq.seq_id for seq, _ in decision.chunks
        }  # others would sit on blocks that may go before they are used
        decision.admissions = [new for new in decision.admissions if new.seq.seq_id in begin]
        if len(decision.decodes) == 1 and not decision.chunks and self._speculates:
            self._add_drafts(decision, budget - decision.decodes[0].num_to_compute)
        return decision

    def _further_block(self) -> Decision | None:
        """Drafts alone, behind blocks of the same sequence that are under way."""
        assert self.speculation is not None
        for group in self.batches.in_turn():
            for seq in self.batches.members(group):
                if seq.drafted and self.speculation.may_follow(seq):
                    decision = Decision(self._allocation(), group, decodes=[seq])
                    self._add_drafts(decision, self.config.token_budget)
                    return decision if decision.num_drafts else None
        return None

    def _add_drafts(self, decision: Decision, room: int) -> None:
        """The drafts that wait, as far as there is room and memory that nobody has to give up."""
        (seq,) = decision.decodes
        end = max(seq.num_scheduled, len(seq.tokens))
        for count in range(min(len(seq.drafted), room), 0, -1):
            if decision.allocation.allocate_spare(seq.kv_tokens, end + count):
                decision.num_drafts = count
                return

    def _ready(self) -> Iterator[Candidate]:
        """Who runs and has tokens to compute. Members of all groups: juniors do not take the KV they need next."""
        for seq in self.running.values():
            if seq.num_to_compute > 0:  # a decode in flight has nothing to compute until its token comes
                yield Candidate(seq, seq.num_scheduled, seq.kv_tokens, seq in self.batches)

    def _room_for_prompts(self, decide: PolicyDecision, going: list[Sequence], prompts: list[Candidate]) -> int:
        """Tokens of prompts that a step may take beside the decodes that go."""
        room = self.config.token_budget - sum(max(1, seq.num_to_compute) for seq in going)
        objective = self.config.policy_config.itl_slo
        if decide.share < 1:
            room = min(room, max(int(decide.share * room), _LEAST_CHUNK))
        if objective is None or not decide.decodes_go or not self._num_decoding:
            return room
        decodes = Shape.of_single_rows(seq.num_scheduled for seq in going)
        groups = self.config.num_groups
        if self._prompts_go_on < groups:
            # Whoever decodes has short steps behind it, and now waits for a long one more than there are groups.
            objective *= groups / (groups + 1)
        first = min(prompts, key=lambda one: one.seq.rank)
        return min(room, most_rows(self.costs, decodes, first.start, room, groups, objective))

    def _set_share(self, decision: Decision, remaining: int, most: int) -> None:
        """Kept for a round, or for a prompt while nobody decodes, so that its steps are alike; newcomers end it."""
        if self._share_left and not decision.admissions:
            decision.share, decision.share_left = self._share, self._share_left - 1
            return
        num_groups, rounds = self.config.num_groups, len(self.batches) > 0
        decision.share = even_share(remaining, max(most, 1), num_groups, rounds=rounds)
        steps = num_groups if rounds else -(-remaining // max(decision.share, 1))
        decision.share_left = max(steps - 1, 0)

    def _allocate(self, decision: Decision, candidates: list[Candidate], room: int) -> set[int]:
        """Give KV by rank, and cut chunks; the ids of those who may decode."""
        granted: set[int] = set()
        quota = self._quota(candidates, room)
        for one in sorted(candidates, key=lambda one: one.seq.rank):
            if decision.allocation.is_preempted(one.seq):
                continue
            if one.decodes:
                if decision.allocation.allocate(one.seq, one.kv_tokens, one.start + 1):
                    granted.add(one.seq.seq_id)
                continue
            size = min(one.left, room, quota)
            if size < min(one.left, MIN_CHUNK) and decision.chunks:
                room = 0  # a crumb of a further prompt costs more than it brings
            if room <= 0:
                continue
            if self.config.blocks.whole_blocks:
                size = min(size, BLOCK - one.start % BLOCK)  # the state at the block's end is what is kept of it
            if not decision.allocation.allocate(one.seq, one.kv_tokens, one.start + size):
                room = 0  # juniors do not take what this one lacks
                continue
            decision.chunks.append((one.seq, size))
            room -= size
        return granted

    def _quota(self, candidates: list[Candidate], room: int) -> int:
        """What one prompt may take of a step: all, or its part where several are read side by side."""
        side_by_side = min(self.config.policy_config.max_partial_prefills, sum(not one.decodes for one in candidates))
        return max(room // side_by_side, _LEAST_CHUNK) if side_by_side > 1 else room

    # -- carrying out ------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> StepPlan:
        for block in decision.allocation.evicted:
            self.prefix_cache.evict(block)
        for seq in decision.allocation.preempted:
            self._preempt(seq)
        for new in decision.admissions:
            self._admit(new)
        for seq, ahead in decision.fetching:
            self.prefix_cache.fetch(seq, ahead)
        policy_input = self._policy_input(decision.group)
        work = [*((seq, seq.num_to_compute) for seq in decision.decodes), *decision.chunks]
        changes = self.prefix_cache.take_changes()
        plan = StepPlan(
            self._next_step,
            new=tuple(map(self._introduce, decision.admissions)),
            slices=tuple(self._slice(*one, decision.num_drafts) for one in work),
            freed=tuple(self._freed),
            saves=changes.saves,
            dropped=changes.dropped,
            fetches=changes.fetches,
            erased=changes.erased,
        )
        self._freed.clear()
        for seq, _ in work:
            self.prefix_cache.store_full_blocks(seq, self._used)
        self._next_step += 1
        self._plans.append(plan)
        if work:
            self._share, self._share_left = decision.share, decision.share_left
            self.batches.had_turn(decision.group, decision.late)
            self.policy.scheduled(policy_input)
            self._prompts_go_on = self._prompts_go_on + 1 if decision.chunks else 0
            self.batches.balance()
        return plan

    def _preempt(self, seq: Sequence) -> None:
        """A running sequence's KV: it waits from now on, with its tokens."""
        del self.running[seq.seq_id]
        self.batches.leave(seq)
        if self.config.rewind is UNLIMITED and self._admission.reads_faster(seq.num_sure):
            self.prefix_cache.swap_out(seq)
        self._release(seq)
        self._forget_drafts(seq)
        seq.forget_stages()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(seq)

    def _admit(self, new: Admission) -> None:
        seq, match = new.seq, new.match
        self.waiting.remove(seq)
        self.running[seq.seq_id] = seq
        seq.num_reused = seq.num_scheduled = match.num_tokens
        seq.num_cached = match.num_tokens if seq.num_cached is None else seq.num_cached
        seq.blocks = list(match.blocks[: match.num_tokens // BLOCK])
        self.prefix_cache.tree.use(match.blocks)
        self._used += use_of(match.num_tokens)

    def _slice(self, seq: Sequence, size: int, num_drafts: int) -> Slice:
        """The next ``size`` known tokens, and drafts behind them."""
        start, before = seq.num_scheduled, seq.kv_tokens
        end = start + size
        token_ids = tuple(seq.tokens[start:end])
        if num_drafts and self.speculation is not None:
            token_ids += self.speculation.go(seq, num_drafts)
        seq.num_scheduled = start + len(token_ids)
        seq.begun_at = self._now if seq.begun_at is None else seq.begun_at
        seq.num_in_flight += 1
        seq.num_awaited += 1
        self._used += growth(before, seq.kv_tokens)
        num_logits = min(num_drafts + 1, len(token_ids)) if num_drafts else int(end == len(seq.tokens))
        return Slice(seq.seq_id, start, token_ids, num_logits, num_drafts)

    def _introduce(self, new: Admission) -> NewSequence:
        seq = new.seq
        seq.is_known = True
        blocks = tuple(block.block_id for block in new.match.blocks)
        prefix = tuple(seq.tokens[: seq.num_reused])
        return NewSequence(seq.seq_id, seq.params, seq.seed, blocks, prefix, seq.num_prompt_tokens)

    # -- learning ----------------------------------------------------------------------------

    def _take_plan(self, result: StepResult) -> StepPlan:
        expected = self._plans[0].step if self._plans else None
        if result.step != expected:
            raise ValueError(f"the result of step {result.step} came where that of step {expected} was due")
        plan = self._plans[0]
        rows = {p.seq_id: p.num_logits for p in plan.slices if p.num_logits}
        got = {s.seq_id: s.tokens for s in result.sampled}
        if rows.keys() != got.keys() or not all(map(self._answers, plan.slices, repeat(got))):
            counts = {seq_id: len(tokens) for seq_id, tokens in got.items()}
            raise ValueError(f"step {result.step} asked for {rows} tokens by sequence and got {counts}")
        self._plans.popleft()
        return plan

    def _answers(self, part: Slice, got: Mapping[int, tuple[SampledToken, ...]]) -> bool:
        """Whether what came for a slice is what its rows, and the drafts in it, allow."""
        tokens, seq = got.get(part.seq_id, ()), self.running.get(part.seq_id)
        if not part.num_drafts:
            return len(tokens) == part.num_logits
        if seq is None and part.begins_with_draft:
            return True  # nobody knows any more whether it was void
        if seq is not None and part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
            return not tokens
        return part.is_verdict([token.token_id for token in tokens])

    def _append(self, seq: Sequence, part: Slice, tokens: tuple[SampledToken, ...]) -> Iterator[TokenEvent]:
        """Take what was sampled for a slice, if that is not void."""
        if part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
            if self.speculation is not None:
                self.speculation.counts.void += 1
            return
        seq.num_awaited -= 1
        tried = accepted = 0
        for row, token in enumerate(tokens):
            misses, is_tried = seq.num_misses, bool(seq.ahead)
            reason = seq.append(token.token_id, self.config.max_len)
            seq.token_at = self._now
            if is_tried and self.speculation is not None:
                tried += 1
                accepted += self.speculation.appended(seq, part, row, misses)
                if seq.num_misses > misses and self.speculation.has_states and seq.num_scheduled < part.end:
                    seq.num_scheduled = part.start
            yield TokenEvent(seq.seq_id, token, reason)
            if reason is not None:
                self._end(seq, reason)
                break
        if tried and self.speculation is not None and seq.finish_reason is None:
            self.speculation.controller.tried(seq.seq_id, tried, accepted)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        self._forget_drafts(seq)
        self._deadlines.remove(seq)
        if self.waiting.get(seq.seq_id) is seq:
            self.waiting.remove(seq)
            self.prefix_cache.leave(seq)
            return
        del self.running[seq.seq_id]
        self.batches.leave(seq)
        if reason is not FinishReason.ERROR:
            self.prefix_cache.store_rest(seq, self._used)
        self._release(seq)

    def _forget_drafts(self, seq: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(seq)

    def _release(self, seq: Sequence) -> None:
        """The KV of a sequence is not needed any more: the next plan says so, before it says anything else."""
        self._used -= use_of(seq.kv_tokens)
        self._freed.append(seq.seq_id)

    def check(self) -> None:
        """Assert what must hold between any two events; tests call it after each."""
        invariants.check(self)
