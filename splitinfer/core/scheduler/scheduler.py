"""Decides what every stage does next: events in, plans out.

The course of a sequence: ``add`` queues it; ``schedule`` admits it when there is room and cuts its tokens still to
compute into slices; ``update`` appends what the last stage sampled, so there is one more token to compute; ``finish``
(or an end token, or the maximal length) ends it; its KV is freed by the next plan.

Computed KV is cached, block by block, for sequences that begin with the same tokens (``core.kv.prefix_cache``). A
block is saved by the plan after the one that completes it, before anything else happens in that plan, so every later
plan may begin a sequence with it. A sequence whose next block is just being computed by another, or read from disk,
waits for it.

A running sequence computes its prompt or decodes. Chunks of a prompt need no result of each other, so they go in
consecutive steps that are all in flight; a decode waits for the last token. A sequence with its first token joins a
group (``core.scheduler.microbatches``), and a step is

    [ every member of one group, one token each | chunks of prompts, with what is left of token_budget ]

so no decode is ever skipped for a prompt, and none waits longer than one step of bounded size per stage. That is the
default; other policies (``core.scheduler.policy``) let prompts go first or stop admission, and the room for prompts
may follow an objective for the time between tokens, by what steps have cost so far (``core.costs``).
While sequences decode, as many plans are under way as there are groups: one more would only delay the next decode.
While none does, ``max_in_flight`` plans keep one waiting in front of each stage.

With a drafter a decode is a block: the token and some drafts (``core.speculation.speculation``). ``wishes`` returns
how many and for which sequences, ``take`` takes them in, and the next plan contains them. How many groups there are,
how many drafts each member gets and how many blocks fly is one choice by cost (``core.speculation.grouping``); blocks
of one sequence may follow each other without waiting for results, and after a result that voids them the next one
begins at once.

KV is bounded (``core.kv.budget``). A sequence is admitted when its whole prompt and the beginning of its answer
fit beside what all others have or have reserved (``core.scheduler.admission``). Where growing answers fill the memory
nevertheless, sequences are preempted (chosen by ``core.scheduler.kv_allocation``): a preempted sequence waits, keeps
its tokens, and is computed again later. A token's random key depends on its position alone, so preemption does not
change the tokens. Where a stage's device had no memory left although the budget was kept, the budget is lowered
(``lower_budget``) before the sequences are queued again; those that do not fit even alone then are ``unable``.

The planner (``core.scheduler.planner``) decides what the next plan does and changes nothing; ``schedule`` applies its
decision. Both read the same state (``core.scheduler.state``).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.block_tree import DiskBlock, full_keys
from splitinfer.core.kv.budget import NOTHING, KVBudget, KVUse, NeverFits
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.kv.rewind import UNLIMITED
from splitinfer.core.plan import NewSequence, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.decision import Admission, Decision
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.scheduler.planner import StepPlanner
from splitinfer.core.scheduler.policy import PolicyConfig, policy_of
from splitinfer.core.scheduler.results import check_result
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.scheduler.waiting_queue import Deadlines
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.group_controller import GroupController
from splitinfer.core.speculation.grouping import Member
from splitinfer.core.speculation.speculation import Speculation, Wish

_MOST_UNLEARNED = 16  # steps


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a sequence; ``finish_reason`` is set if the sequence ends with it."""

    seq_id: int
    token: SampledToken
    finish_reason: FinishReason | None


class Scheduler:
    """Pure: no clock, no threads, no arrays. ``core.scheduler.invariants`` states what must always hold.

    ``costs``: the stages' costs as far as they are known before any step; refined with each step's figures.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        kv, costs = config.kv or KVBudget(), costs or CostModel.of(config.num_stages or config.num_groups)
        costs.drafts_at_end = config.drafts_at_end
        groups = GroupController(costs, config.num_groups, fixed=config.fixed_groups)
        self.state = state = SchedulerState(
            config=config,
            policy=policy_of(config.policy_config),
            costs=costs,
            prefix_cache=PrefixCache(config.blocks, kv),
            batches=MicroBatches(config.num_groups),
            speculation=Speculation(
                costs,
                groups,
                config.rewind,
                config.blocks.keeps_blocks,
                kv.block,
                is_at_end=config.drafts_at_end,
            )
            if config.speculates or config.forces
            else None,
            groups=groups,
        )
        self.waiting, self.running, self.batches = state.waiting, state.running, state.batches
        self.costs, self.prefix_cache, self.speculation = state.costs, state.prefix_cache, state.speculation
        self._admission = AdmissionControl(state)
        self.planner = StepPlanner(state, self._admission)
        self._deadlines = Deadlines()
        self._unlearned: deque[tuple[StepInFlight, StepResult, float]] = deque()
        self._next_step = self._num_arrived = 0
        self._missed: set[int] = set()  # sequences with wrong drafts in the last result
        self.num_preemptions = 0  # times a running sequence was preempted
        self._is_lowered = False  # the budget, below the config's

    @property
    def config(self) -> SchedulerConfig:
        """The limits and rules in force; ``tune`` changes them."""
        return self.state.config

    # -- events in ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: ``max_waiting`` requests wait already.
            NeverFits: its KV is too large for a stage even when alone.
        """
        self.config.check_room(seq, len(self.waiting))
        seq.arrival = self._num_arrived
        if self.config.blocks.keeps_blocks:
            seq.keys = full_keys(self.config.blocks.root, seq.tokens, self.state.budget.block)
        self._num_arrived += 1
        self.waiting.add(seq)
        self._deadlines.add(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence from outside (abort, a stop string); False if it has ended already.

        Its slices under way still run and are ignored; its KV is freed by the next plan.
        """
        seq = self.running.get(seq_id) or self.waiting.get(seq_id)
        if seq is None:
            return False
        self._end(seq, reason)
        self._regroup()
        return True

    def expire(self, now: float) -> list[int]:
        """End every sequence whose deadline is over (``ABORT``) and return their ids. ``now``: seconds on the caller's
        clock."""
        seq_ids = self._deadlines.over(now)
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ABORT)
        return seq_ids

    def update(self, result: StepResult, returned_at: float = 0.0, *, learn: bool = True) -> list[TokenEvent]:
        """Take the result of the oldest plan under way and return its tokens. ``returned_at``: when it came, in seconds
        on the first stage's clock. ``learn``: refine the costs at once; else ``learn`` does, when there is time.

        Raises:
            ValueError: the result does not answer that plan; the pipeline keeps order, so a peer is broken.
        """
        step = check_result(result, next(iter(self.state.in_flight), None), self.running)
        plan = self.state.in_flight.popleft().plan
        self.state.now, self.state.returned_at = max(self.state.now, returned_at), returned_at
        sampled = {s.seq_id: s.tokens for s in result.sampled}
        drafts = {s.seq_id: s.drafts for s in result.sampled if s.drafts and s.tokens}
        self._missed = set()
        events: list[TokenEvent] = []
        joining: list[Sequence] = []
        for part in plan.slices:
            seq = self.running.get(part.seq_id)
            if seq is None:
                continue  # it ended while this step was under way
            seq.num_in_flight -= 1
            events += self._append(seq, part, sampled.get(part.seq_id, ()))
            if part.seq_id in drafts and seq.finish_reason is None and self.speculation is not None:
                self.speculation.propose(seq, drafts[part.seq_id], self.config.longest(seq))
            if part.num_logits and seq.finish_reason is None and seq not in self.batches:
                joining.append(seq)
        for seq in joining:  # after those that end have left, so that groups stay equal
            self.batches.join(seq)
        self.prefix_cache.learn(plan, result.figures)
        self._unlearned.append((step, result, returned_at))
        if learn or len(self._unlearned) > _MOST_UNLEARNED:
            self.learn()
        self.state.groups.returned(plan)
        if self.speculation is not None:
            self.speculation.returned(plan, result, returned_at)
        self._regroup()
        return events

    def _regroup(self) -> None:
        """Choose groups and drafts again where that is due, and move members."""
        groups, speculation = self.state.groups, self.speculation
        members = {seq.seq_id: seq for group in self.batches.groups for seq in group}
        if len(members) < 2:
            groups.forget()
            self.batches.use(groups.most_groups)
        elif groups.is_due(frozenset(members)):
            asked = {seq_id: self._member(seq) for seq_id, seq in members.items()}
            objective = self.config.policy_config.itl_slo
            position = sum(len(seq.tokens) for seq in members.values()) // len(members)
            groups.choose(asked, objective, position, has_drafter=self.config.speculates)
            self.batches.use(groups.most_groups if groups.choice is None else groups.choice.groups)
        if speculation is not None:
            speculation.are_several = len(members) > 1
        self.batches.balance()

    def _member(self, seq: Sequence) -> Member:
        """A sequence as the choice of groups sees it."""
        if self.speculation is None or not self.config.speculates:
            return Member(0.0, 0)
        return self.speculation.member(seq)

    def learn(self) -> None:
        """Refine the stages' costs by the steps that have returned."""
        while self._unlearned:
            step, result, returned_at = self._unlearned.popleft()
            self.costs.learn(step.plan.slices, result.figures, returned_at, step.idle_since)

    def replay(self, kept: Iterable[DiskBlock] = ()) -> None:
        """Queue every running sequence again, after the stages have lost everything but the blocks ``kept`` on their
        disks; its KV is computed again from its tokens.

        Nothing that was sampled is lost or sampled twice: the sequences have their tokens, and those still to come
        depend on nothing else.
        """
        self.state.in_flight.clear()
        self.state.freed.clear()
        self.prefix_cache.clear(kept)
        self.batches.clear()
        self._regroup()
        self.state.used, self.state.share_left = NOTHING, 0
        for seq in self.running.values():
            self._forget_drafts(seq)
            seq.forget_stages()
            self.waiting.add(seq)
        self.running.clear()

    def moved_to(self, config: SchedulerConfig) -> "Scheduler":
        """A scheduler of other stages, which hold nothing yet, with all sequences in its queue. Call after ``replay``;
        this scheduler is of no use afterwards.

        Raises:
            NeverFits: a sequence is too large for one of those stages even when alone; nothing has changed.
        """
        for seq in self.waiting:
            config.check_fits(seq)
        new = Scheduler(config)
        new.state.now, new.num_preemptions = self.state.now, self.num_preemptions
        new._next_step, new._num_arrived, new._deadlines = self._next_step, self._num_arrived, self._deadlines
        for seq in self.waiting:
            if config.blocks.keeps_blocks:
                seq.keys = full_keys(config.blocks.root, seq.tokens, new.state.budget.block)
            new.waiting.add(seq)
        return new

    def lower_budget(self, stage: int) -> bool:
        """Lower a stage's budget because its device had no memory left for what is in use; call before ``replay``.
        Returns whether there is less now, so that it will not happen for ever."""
        before, use = self.state.budget, self.kv_used + self.kv_stored
        self.prefix_cache.budget = before.lowered(stage, use)
        self._is_lowered = True
        return self.state.budget != before

    def unable(self) -> list[tuple[Sequence, NeverFits]]:
        """The sequences that cannot go on even alone since the budget was lowered, and why; the caller ends them."""
        return [*self._unable()] if self._is_lowered else []

    def _unable(self) -> Iterator[tuple[Sequence, NeverFits]]:
        for seq in (*self.running.values(), *self.waiting):
            try:
                self.state.budget.check(self._admission.reservation(seq))
            except NeverFits as error:
                yield seq, error

    def drop(self, session: str) -> None:
        """Forget a session: the next plan frees its blocks, except those that others begin with, too."""
        self.prefix_cache.forget(session)

    def tune(self, policy_config: PolicyConfig, token_budget: int, max_running: int) -> None:
        """Change the rules from the next plan on; running sequences continue."""
        self.state.config = replace(
            self.config, policy_config=policy_config, token_budget=token_budget, max_running=max_running
        )
        self.state.policy = policy_of(policy_config)
        self.state.share_left = 0

    def fix_groups(self, count: int | None) -> None:
        """Have sequences decode in ``count`` groups, at most as many as configured; ``None``: as configured."""
        groups = self.state.groups
        groups.most_groups = self.config.num_groups if count is None else min(count, self.config.num_groups)
        groups.fixed = self.config.fixed_groups or count is not None
        groups.forget()
        self._regroup()

    # -- drafts ------------------------------------------------------------------------------

    def wishes(self) -> list[Wish]:
        """Return the drafts that the next plan could contain, one wish for each of its sequences that gets some; they
        are handed to ``take`` before the next ``schedule``. Asking twice is harmless."""
        if not self.config.speculates or self.speculation is None or len(self.state.in_flight) >= self.state.limit:
            return []
        self._force()
        order = self.planner.groups_in_turn()
        for group in order:
            members = self.batches.members(group)
            if members and not self.batches.is_in_flight(group):
                return [] if self.planner.keeps_decodes_waiting(group) else self._wishes_of(members)
        if self.state.reads_prompts:
            return []
        for group in order:
            if found := self._wishes_of(self.batches.going_on(group, self.speculation.may_follow)):
                return found
        return []

    def _wishes_of(self, members: list[Sequence]) -> list[Wish]:
        """Wishes for sequences of one step, as far as it has room: half of it is a prompt's while one is read."""
        assert self.speculation is not None
        room = self.config.token_budget - sum(seq.num_to_compute for seq in members)
        room = room // 2 if self.state.reads_prompts else room
        found = list[Wish]()
        for seq in members:
            ask = self.speculation.further if seq.num_awaited else self.speculation.first
            wish = ask(seq, self.config.longest(seq))
            if wish is not None and room > 0:
                found.append(wish if wish.count <= room else replace(wish, count=room))
                room -= found[-1].count
        return found

    def take(self, wish: Wish) -> None:
        """Take in the drafts made for a wish: all, fewer or none. Results may have come since the wish."""
        if self.speculation is not None and self.running.get(wish.seq.seq_id) is wish.seq:
            self.speculation.take(wish, self.config.longest(wish.seq))

    @property
    def drafts_next(self) -> list[Sequence]:
        """The sequences that are likely to get drafts next, so that a drafter can read their prompts."""
        if self.speculation is None or not self.config.speculates:
            return []
        return [seq for seq in self.running.values() if self.speculation.is_likely(seq)]

    def _force(self) -> None:
        """Have the tokens that must come next go out as drafts."""
        if self.speculation is None:
            return
        for seq in self.running.values():
            if seq.rules is not None and seq in self.batches:
                self.speculation.force(seq, self.config.longest(seq))

    def still_wanted(self, plan: StepPlan) -> StepPlan:
        """Return a plan that has not left the first stage, without slices that a result has voided since."""
        step = next((step for step in self.state.in_flight if step.plan is plan), None)
        if step is None:
            return plan  # the plans were cleared since, and its sequences may have been planned again
        void = [part for part in plan.slices if part.begins_with_draft and self._is_void(part)]
        if not void:
            return plan
        for part in void:
            self.running[part.seq_id].num_in_flight -= 1
            if self.speculation is not None:
                self.speculation.counts.unsent += 1
        step.plan = replace(plan, slices=tuple(part for part in plan.slices if part not in void))
        self.batches.balance()  # a sequence without a step under way may move
        return step.plan

    def void_slices(self) -> tuple[tuple[int, int], ...]:
        """Return the slices under way that the last result has made void, as (step, sequence); call it after each."""
        missed, self._missed = self._missed, set()
        return tuple(
            (step.plan.step, part.seq_id)
            for step in self.state.in_flight
            for part in step.plan.slices
            if part.seq_id in missed and part.begins_with_draft and self._is_void(part)
        )

    def _is_void(self, part: Slice) -> bool:
        seq = self.running.get(part.seq_id)
        return seq is not None and not seq.num_awaited

    # -- plans out ---------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Return the next plan, or ``None`` when there is nothing to do or no stage could take it.

        ``now``: seconds on the first stage's clock. The content of a plan may depend on it; whether there is one does
        not.
        """
        self.state.now = max(self.state.now, now)
        self._force()
        decision = self.planner.decide()
        return None if decision is None else self._apply(decision)

    def predicted(self, plan: StepPlan) -> float | None:
        """Return the seconds after which a plan's result is due, if nothing else is under way; ``None``: not known, as
        for a plan whose blocks are read from disks."""
        return None if plan.fetches else self.costs.predicted(Shape.of(plan.slices))

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` will end the next sequence, in seconds on the caller's clock; ``None``: never."""
        return self._deadlines.next

    @property
    def num_in_flight(self) -> int:
        """Plans under way."""
        return len(self.state.in_flight)

    @property
    def oldest_step(self) -> int | None:
        """The number of the plan that has been under way for longest; ``None`` if none is."""
        return self.state.in_flight[0].plan.step if self.state.in_flight else None

    @property
    def kv_used(self) -> KVUse:
        """The KV of all running sequences."""
        return self.state.used

    @property
    def kv_stored(self) -> KVUse:
        """The KV of all cached blocks."""
        return self.prefix_cache.use

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits, or is still to be freed."""
        return not (self.waiting or self.running or self.state.in_flight or self.state.has_changes)

    # -- applying a decision -----------------------------------------------------------------

    def _apply(self, decision: Decision) -> StepPlan:
        for block in decision.allocation.evicted:
            self.prefix_cache.evict(block)
        for seq in decision.allocation.preempted:
            self._preempt(seq)
        for new in decision.admissions:
            self._admit(new)
        for seq, ahead in decision.fetching:
            self.prefix_cache.fetch(seq, ahead)
        policy_input = self.state.policy_input(decision.group)
        work = [*((seq, seq.num_to_compute) for seq in decision.decodes), *decision.chunks]
        changes = self.prefix_cache.take_changes()
        plan = StepPlan(
            self._next_step,
            new=tuple(map(self._introduce, decision.admissions)),
            slices=tuple(self._slice(seq, size, decision.drafts.get(seq.seq_id, 0)) for seq, size in work),
            freed=tuple(self.state.freed),
            saves=changes.saves,
            dropped=changes.dropped,
            fetches=changes.fetches,
            erased=changes.erased,
        )
        self.state.freed.clear()
        for seq, _ in work:
            self.prefix_cache.store_full_blocks(seq, self.state.used)
        self._next_step += 1
        self.state.in_flight.append(StepInFlight(plan, self._idle_since(plan, [*decision.drafts.values()])))
        if work:
            self.state.share, self.state.share_left = decision.share, decision.share_left
            self.batches.had_turn(decision.group, decision.late)
            self.state.policy.scheduled(policy_input)
            self.state.prompts_go_on = self.state.prompts_go_on + 1 if decision.chunks else 0
            self._regroup()
        return plan

    def _idle_since(self, plan: StepPlan, drafts: list[int]) -> float | None:
        """From when on the coordinator had only a step of decodes and drafts to do: since the last result, and the
        drafts made after it, where no other step is under way; else since now, where it has new ``drafts``."""
        if not plan.has_only_logits:
            return None
        if self.state.returned_at and not self.state.in_flight:
            rounds = 0 if self.config.drafts_at_end else max(drafts, default=0)
            return self.state.returned_at + rounds * self.costs.drafting(len(drafts))
        return self.state.now if drafts else None

    def _preempt(self, seq: Sequence) -> None:
        """Free a running sequence's KV and queue it again, with its tokens."""
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
        here = [block for block in match.blocks if block.is_here]  # the others it takes over
        seq.blocks = here[: match.num_tokens // self.state.budget.block]
        seq.is_stored = len(here) == len(match.blocks)
        self.prefix_cache.tree.use(here)
        self.state.used += self.state.budget.use_of(match.num_tokens)

    def _slice(self, seq: Sequence, size: int, num_drafts: int) -> Slice:
        """A slice of the next ``size`` known tokens, with ``num_drafts`` drafts after them."""
        start, before = seq.num_scheduled, seq.kv_tokens
        end = start + size
        token_ids = tuple(seq.tokens[start:end])
        if num_drafts and self.speculation is not None:
            token_ids += self.speculation.go(seq, num_drafts)
        seq.num_scheduled = start + len(token_ids)
        seq.begun_at = self.state.now if seq.begun_at is None else seq.begun_at
        seq.num_in_flight += 1
        seq.num_awaited += 1
        self.state.used += self.state.budget.growth(before, seq.kv_tokens)
        num_logits = min(num_drafts + 1, len(token_ids)) if num_drafts else int(end == len(seq.tokens))
        num_next = self._num_next(seq) if num_logits else 0
        return Slice(seq.seq_id, start, token_ids, num_logits, num_drafts, num_next)

    def _num_next(self, seq: Sequence) -> int:
        """How many drafts the last stage is to make behind what it samples."""
        if self.speculation is None or not self.config.drafts_at_end:
            return 0
        return self.speculation.num_next(seq, self.config.longest(seq))

    def _introduce(self, new: Admission) -> NewSequence:
        seq = new.seq
        seq.is_known = True
        blocks = tuple(block.block_id for block in new.match.blocks)
        prefix = tuple(seq.tokens[: seq.num_reused])
        return NewSequence(seq.seq_id, seq.params.for_stages, seq.seed, blocks, prefix, seq.num_prompt_tokens)

    # -- taking in results -------------------------------------------------------------------

    def _append(self, seq: Sequence, part: Slice, tokens: tuple[SampledToken, ...]) -> Iterator[TokenEvent]:
        """Append what was sampled for a slice, unless that is void."""
        if part.is_void(len(seq.tokens) - 1, seq.tokens[-1]):
            if self.speculation is not None:
                self.speculation.counts.void += 1
            return
        seq.num_awaited -= 1
        tried = accepted = 0
        for row, token in enumerate(tokens):
            misses, is_tried = seq.num_misses, bool(seq.ahead)
            is_forced = len(seq.tokens) in seq.forced
            reason = seq.append(token.token_id, self.config.max_len)
            seq.token_at = self.state.now
            seq.num_forced += is_tried and is_forced
            if is_tried and not is_forced and self.speculation is not None:
                is_right = self.speculation.appended(seq, part, row, misses)
                tried, accepted = tried + 1, accepted + is_right
                seq.num_tried, seq.num_right = seq.num_tried + 1, seq.num_right + is_right
                if seq.num_misses > misses:
                    self._missed.add(seq.seq_id)
            yield TokenEvent(seq.seq_id, token, reason)
            if reason is not None:
                self._end(seq, reason)
                break
        if self.speculation is not None and seq.finish_reason is None:
            self._goes_on(seq, self.speculation, tried, accepted)

    def _goes_on(self, seq: Sequence, speculation: Speculation, tried: int, accepted: int) -> None:
        """Learn from the verdict on a sequence's drafts, and store the blocks of KV that only it has completed."""
        if tried:
            speculation.controller.tried(seq.seq_id, tried, accepted)
        if speculation.has_states and seq.has_drafted and not seq.num_awaited:
            self.prefix_cache.store_full_blocks(seq, self.state.used)  # the state is that at their end only now

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
        if self.speculation is not None and self.speculation.has_states and seq.has_drafted:
            seq.is_stored = False  # its state may be one behind its last token
        if reason is not FinishReason.ERROR:
            # Its KV is freed by the plan that stores it, so the blocks may take its place.
            self.prefix_cache.store_rest(
                seq, self.state.used - self.state.budget.use_of(seq.kv_tokens), again=self.config.rewind is UNLIMITED
            )
        self._release(seq)

    def _forget_drafts(self, seq: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(seq)

    def _release(self, seq: Sequence) -> None:
        """Have the next plan free a sequence's KV."""
        self.state.used -= self.state.budget.use_of(seq.kv_tokens)
        self.state.freed.append(seq.seq_id)
