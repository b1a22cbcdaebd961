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

With a drafter a decode is a block: the token and some drafts (``core.speculation.speculation``). ``proposals`` returns
how many and for which sequences, ``take`` takes them in, and the next plan contains them. How many groups there are,
how many drafts each member gets and how many blocks fly is one choice by cost (``core.speculation.chooser``); blocks
of one sequence may follow each other without waiting for results, and after a result that voids them the next one
begins at once.

KV is bounded (``core.kv.budget``). A sequence is admitted when its whole prompt and the beginning of its answer
fit beside what all others have or have reserved (``core.scheduler.admission``). Where growing answers fill the memory
nevertheless, sequences are preempted (chosen by ``core.scheduler.kv_allocation``): a preempted sequence waits, keeps
its tokens, and is computed again later. A token's random key depends on its position alone, so preemption does not
change the tokens. Where a stage's device had no memory left although the budget was kept, the budget is lowered
(``lower_budget``) before the sequences are queued again; those that do not fit even alone then are ``unable``.

The planner (``core.scheduler.planner``) decides what the next plan does and changes nothing; ``schedule`` applies its
decision.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.kv.block_tree import DiskBlock, full_keys
from splitinfer.core.kv.budget import NOTHING, KVBudget, KVUse, NeverFits
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.plan import NewSequence, Slice, StepPlan, StepResult
from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.decision import Decision
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.lifecycle import Lifecycle
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.scheduler.planner import StepPlanner
from splitinfer.core.scheduler.policy import Policy, PolicyConfig
from splitinfer.core.scheduler.results import Results, TokenEvent
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.choice import Choosers
from splitinfer.core.speculation.chooser import Chooser
from splitinfer.core.speculation.speculation import Proposal, Speculation


class Scheduler:
    """Pure: no clock, no threads, no arrays. ``core.scheduler.invariants`` states what must always hold.

    ``costs``: the stages' costs as far as they are known before any step; refined with each step's figures.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        kv, costs = config.kv or KVBudget(), costs or CostModel.of(config.num_stages or config.num_groups)
        costs.drafts_at_end, costs.drafts_at_once = config.drafts_at_end, config.drafts_at_once
        chooser = Chooser(costs, config.num_groups, fixed=config.fixed_groups)
        self.state = state = SchedulerState(
            config=config,
            policy=Policy(config.policy_config),
            costs=costs,
            prefix_cache=PrefixCache(config.blocks, kv),
            batches=MicroBatches(config.num_groups),
            speculation=Speculation(
                costs,
                chooser,
                config.rewind,
                config.blocks.keeps_blocks,
                kv.block,
                is_at_end=config.drafts_at_end,
                choosers=Choosers() if config.with_ngrams else None,
            )
            if config.speculates or config.forces
            else None,
            chooser=chooser,
        )
        self.waiting, self.running, self.batches = state.waiting, state.running, state.batches
        self.costs, self.prefix_cache, self.speculation = state.costs, state.prefix_cache, state.speculation
        self._admission = AdmissionControl(state)
        self.planner = StepPlanner(state, self._admission)
        self._life = Lifecycle(state, self._admission)
        self._results = Results(state, self._life)
        self._unlearned: deque[tuple[StepInFlight, StepResult, float]] = deque()
        self._next_step = self._num_arrived = 0
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
        if not (self.waiting or self.running):
            self.state.returned_at = 0.0  # since then nobody wanted anything of the coordinator
        seq.arrival = self._num_arrived
        if self.config.blocks.keeps_blocks:
            seq.keys = full_keys(self.config.blocks.root, seq.tokens, self.state.budget.block)
        self._num_arrived += 1
        self.waiting.add(seq)
        self._life.deadlines.add(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence from outside (abort, a stop string); False if it has ended already.

        Its slices under way still run and are ignored; its KV is freed by the next plan.
        """
        seq = self.running.get(seq_id) or self.waiting.get(seq_id)
        if seq is None:
            return False
        self._life.end(seq, reason)
        self.state.regroup()
        return True

    def expire(self, now: float) -> list[int]:
        """End every sequence whose deadline is over (``ABORT``) and return their ids. ``now``: seconds on the caller's
        clock."""
        seq_ids = self._life.deadlines.over(now)
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ABORT)
        return seq_ids

    def update(self, result: StepResult, returned_at: float = 0.0, *, learn: bool = True) -> list[TokenEvent]:
        """Take the result of the oldest plan under way and return its tokens. ``returned_at``: when it came, in seconds
        on the first stage's clock. ``learn``: refine the costs at once; else ``learn`` does, behind the next launch.

        Raises:
            ValueError: the result does not answer that plan; the pipeline keeps order, so a peer is broken.
        """
        step, events = self._results.take(result, returned_at)
        self.state.regroup()
        self._unlearned.append((step, result, returned_at))
        if learn:
            self.learn()
        return events

    def learn(self) -> None:
        """Refine the stages' costs by the steps that have returned, and choose groups and drafts by them, which takes
        milliseconds for many: what follows on a result depends on neither."""
        if not self._unlearned:
            return
        while self._unlearned:
            step, result, returned_at = self._unlearned.popleft()
            self.costs.learn(step.plan.slices, result.figures, returned_at, step.idle_since)
        self.state.regroup(has_learned=True)

    def forget(self, session: str) -> None:
        """Free what a session keeps, but for blocks that others begin with, too."""
        self.prefix_cache.forget(session)
        if self.state.left is not None and self.state.left.session == session:
            self._life.free_left()

    def replay(self, kept: Iterable[DiskBlock] = ()) -> None:
        """Queue every running sequence again, after the stages have lost everything but the blocks ``kept`` on their
        disks; its KV is computed again from its tokens.

        Nothing that was sampled is lost or sampled twice: the sequences have their tokens, and those still to come
        depend on nothing else.
        """
        self.state.in_flight.clear()
        self.state.freed.clear()
        self.state.newly_left.clear()
        self.state.left = None
        self.prefix_cache.clear(kept)
        self.batches.clear()
        self.state.regroup()
        self.state.used, self.state.share_left = NOTHING, 0
        for seq in self.running.values():
            self._life.forget_drafts(seq)
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
        new.state.now, new._life.num_preemptions = self.state.now, self.num_preemptions
        new._next_step, new._num_arrived, new._life.deadlines = self._next_step, self._num_arrived, self._life.deadlines
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
        found = list[tuple[Sequence, NeverFits]]()
        for seq in (*self.running.values(), *self.waiting) if self._is_lowered else ():
            try:
                self.state.budget.check(self._admission.reservation(seq))
            except NeverFits as error:
                found.append((seq, error))
        return found

    def tune(self, policy_config: PolicyConfig, token_budget: int, max_running: int) -> None:
        """Change the rules from the next plan on; running sequences continue."""
        self.state.configure(
            replace(self.config, policy_config=policy_config, token_budget=token_budget, max_running=max_running)
        )

    def fix_groups(self, count: int | None) -> None:
        """Have sequences decode in ``count`` groups, at most as many as configured; ``None``: as configured."""
        self.state.fix_groups(count)

    # -- drafts ------------------------------------------------------------------------------

    def proposals(self) -> list[Proposal]:
        """Return the drafts that the next plan could contain, a proposal for each of its sequences that gets some. Hand
        each to ``take`` with its drafts before the next ``schedule``. Asking twice is harmless."""
        if self.speculation is None or not self.config.speculates or self.state.is_full:
            return []
        self._force()
        return self.planner.proposals()

    def take(self, proposal: Proposal) -> None:
        """Take in the drafts made for a proposal: all, fewer or none. Results may have come since it was made."""
        if self.speculation is not None and self.running.get(proposal.seq.seq_id) is proposal.seq:
            self.speculation.take(proposal, self.config.longest(proposal.seq))

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

    def leave_out_void(self) -> None:
        """Leave what results have voided out of the steps that have not left the first stage; call it after each."""
        self._results.leave_out_void()

    def void_slices(self) -> tuple[tuple[int, int], ...]:
        """Return the slices under way that the last result has made void, as (step, sequence); call it after each."""
        return self._results.void_slices()

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
        return self._life.deadlines.next

    @property
    def num_preemptions(self) -> int:
        """Times that a running sequence was preempted."""
        return self._life.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Plans under way."""
        return len(self.state.in_flight)

    @property
    def oldest(self) -> StepInFlight | None:
        """The step that has been in flight for longest."""
        return self.state.in_flight[0] if self.state.in_flight else None

    @property
    def newest(self) -> StepInFlight:
        """The step of the last plan, until its result comes."""
        return self.state.in_flight[-1]

    @property
    def kv_used(self) -> KVUse:
        """The KV of all running sequences."""
        return self.state.used

    @property
    def kv_stored(self) -> KVUse:
        """The KV that is kept for sequences to come: all cached blocks, and what one has left."""
        return self.prefix_cache.use + self.state.left_use

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits, or is still to be freed."""
        return not (self.waiting or self.running or self.state.in_flight or self.state.has_changes)

    def _apply(self, decision: Decision) -> StepPlan:
        introduced = self._move(decision)
        work = [*((seq, seq.num_to_compute) for seq in decision.decodes), *decision.chunks]
        saves, dropped, fetches, erased = self.prefix_cache.take_changes()
        plan = StepPlan(
            self._next_step,
            new=introduced,
            slices=tuple(self._slice(seq, size, decision.drafts.get(seq.seq_id, 0)) for seq, size in work),
            freed=tuple(self.state.freed),
            saves=saves,
            dropped=dropped,
            fetches=fetches,
            erased=erased,
            left=tuple(self.state.newly_left),
        )
        self.state.freed.clear()
        self.state.newly_left.clear()
        for seq, _ in work:
            self.prefix_cache.store_full_blocks(seq, self.state.used)
        self._next_step += 1
        step = StepInFlight.of(plan)
        step.idle_since = self.state.idle_since(plan, [*decision.drafts.values()])
        self.state.in_flight.append(step)
        self.state.note(decision)
        return plan

    def _move(self, decision: Decision) -> tuple[NewSequence, ...]:
        """Evict, preempt, admit and begin to fetch; returns the sequences that are new to the stages."""
        for block in decision.allocation.evicted:
            self.prefix_cache.evict(block)
        for seq in decision.allocation.preempted:
            self._life.preempt(seq)
        introduced = tuple(map(self._life.admit, decision.admissions))
        for seq, forced in decision.forced:
            seq.force(forced)
        for seq, ahead in decision.fetching:
            self.prefix_cache.fetch(seq, ahead)
        if decision.admissions or decision.fetching:
            self._life.free_left()
        return introduced

    def _slice(self, seq: Sequence, size: int, num_drafts: int) -> Slice:
        """A slice of the next ``size`` known tokens, with ``num_drafts`` drafts after them."""
        start, before = seq.num_scheduled, seq.kv_tokens
        end = start + size
        token_ids = seq.go(size, num_drafts, self.state.now)
        if num_drafts and self.speculation is not None:
            self.speculation.counts.went(num_drafts)
        self.state.used += self.state.budget.growth(before, seq.kv_tokens)
        num_logits = min(num_drafts + 1, len(token_ids)) if num_drafts else int(end == len(seq.tokens))
        drafts = self.speculation if num_logits else None
        num_next = 0 if drafts is None else drafts.num_next(seq, self.config.longest(seq))
        last = min(end, seq.num_prompt_tokens - 1)
        scored = seq.sent(start + 1, last + 1) if seq.num_to_score else ()
        return Slice(seq.seq_id, start, token_ids, num_logits, num_drafts, num_next, scored)
