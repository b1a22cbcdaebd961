"""Decides what every stage does next, and keeps the books: events in, plans out.

The life of a sequence: ``add`` queues it; ``schedule`` admits it when there is room and cuts its uncomputed tokens into
slices; ``update`` appends the tokens that the last stage sampled, so there is one more to compute; ``finish`` (or an
end token, or the length limit) ends it. ``core.scheduler.kv_manager`` decides what becomes of its KV.

A running sequence computes its prompt or decodes. Chunks of a prompt need no result of each other, so they go in
consecutive steps that are all in flight; a decode waits for the last token. A sequence with its first token joins a
group (``core.scheduler.microbatches``), and a step is

    [ every member of one group: one token each, and drafts | chunks of prompts, in the rest of token_budget ]

So no decode is ever skipped for a prompt, and none waits longer than one step of bounded size per stage. Other policies
(``core.scheduler.policy``) decide otherwise. While sequences decode, there is one plan under way for each group: one
more would only delay the next decode. While none decodes, ``max_in_flight`` plans keep one waiting before each stage.

A step is filled group by group. Memory is promised to sequences by rank, which may at once evict stored blocks and
preempt other sequences. If that leaves no slice for the group whose turn it is, the next group gets the turn. A
preempted sequence waits with its tokens and is computed again later, to the same tokens.

With a drafter a decode is a block: the token and some drafts (``core.speculation.speculation``). ``proposals`` returns
which sequences may get how many, ``take_drafts`` takes them in, and the next plan contains them.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.grammar import Texts, TokenRules
from splitinfer.core.kv.block_tree import DiskBlock, Match, full_keys
from splitinfer.core.kv.budget import NOTHING, NeverFits
from splitinfer.core.picture import chunk_end
from splitinfer.core.plan import NewSequence, SampledSlice, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.scheduler.chunks import LEAST_CHUNK, ChunkSizes, PromptFrom, Share
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.in_flight import StepInFlight, TokenEvent, check_result
from splitinfer.core.scheduler.kv_manager import Admission, KVManager
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.scheduler.policy import (
    Policy,
    PolicyConfig,
    PolicyDecision,
    PolicyName,
    longest_chunk,
)
from splitinfer.core.scheduler.waiting_queue import Deadlines, WaitingQueue
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.chooser import GroupChooser, Member
from splitinfer.core.speculation.drafter_choice import Choosers
from splitinfer.core.speculation.speculation import Proposal, Speculation

_MOST_SCORED = 64  # rows of prompts in a step whose logits are computed: five arrays of 39 MB at 152,000 tokens

_NO_DRAFTS: Mapping[int, int] = {}
_NO_TOKENS = SampledSlice(-1, ())

SequenceWork = tuple[Sequence, int]  # with the number of its known tokens that a step computes


class Scheduler:
    """Turns requests and results into plans. Pure: no clock, no threads, no arrays.

    config: the limits and rules in force; ``tune`` changes them.
    costs: the stages' costs, as far as known before any step; each step's figures refine them.
    in_flight: the steps under way, oldest first.
    deadlines: the deadlines of all sequences; ``expire`` ends sequences past theirs.
    num_preemptions: times that a running sequence was preempted.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.costs = costs or CostModel.of(config.num_stages or config.num_groups)
        self.costs.drafts_at_end, self.costs.drafts_at_once = config.drafts_at_end, config.drafts_at_once
        self.waiting, self.running = WaitingQueue(), dict[int, Sequence]()
        self.in_flight = deque[StepInFlight]()
        self.batches = MicroBatches(config.num_groups)
        self.kv = KVManager(config, self.costs, self.batches)
        self.prefix_cache = self.kv.cache
        self.chooser = GroupChooser(self.costs, config.num_groups, fixed=config.fixed_groups)
        self.speculation = Speculation(
            self.costs,
            self.chooser,
            config.longest,
            config.rewind,
            config.blocks.keeps_blocks,
            self.kv.budget.block,
            choosers=Choosers() if config.with_ngrams else None,
        )
        self.num_preemptions = 0
        self.deadlines = Deadlines()
        self._policy, self._chunks = Policy(config.policy_config), ChunkSizes(self.costs, self.batches)
        self._unlearned = deque[tuple[StepInFlight, StepResult, float]]()
        self._next_step = 0
        self._now = self._returned_at = 0.0  # the latest known time and the last result's, on the first stage's clock
        self._preempted = set[int]()  # for the step being planned
        self._is_lowered = False  # whether the budget is below the config's

    # -- requests ----------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: ``max_waiting`` requests wait already.
            NeverFits: its KV is too large for a stage even when it runs alone.
        """
        self.config.check_room(seq, len(self.waiting))
        if not (self.waiting or self.running):
            self._returned_at = 0.0  # the coordinator has been idle since the last result
        self._queue(seq)
        self.deadlines.add(seq)

    def key(self, seq: Sequence) -> None:
        """Compute the keys of a sequence's blocks, unless it has them. Any thread may do so before ``add``, which would
        otherwise take 12 ms for 100,000 tokens."""
        keyed_by = self.config.blocks.root, self.kv.budget.block
        if self.config.blocks.keeps_blocks and seq.keyed_by != keyed_by:
            seq.keys, seq.keyed_by = full_keys(keyed_by[0], seq.tokens, keyed_by[1]), keyed_by

    def _queue(self, seq: Sequence) -> None:
        self.key(seq)
        self.waiting.add(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence for an outside reason (abort, a stop string). Return False if it has ended already. Its slices
        under way still run and are ignored. Its KV is stored, and freed or retained (``KVManager.end``)."""
        seq = self.running.get(seq_id) or self.waiting.get(seq_id)
        if seq is None:
            return False
        self._end(seq, reason)
        self._regroup()
        return True

    def expire(self, now: float) -> list[int]:
        """End every sequence whose deadline has passed (``ABORT``) and return their ids. ``now``: seconds on the
        caller's clock."""
        seq_ids = self.deadlines.over(now)
        for seq_id in seq_ids:
            self.finish(seq_id, FinishReason.ABORT)
        return seq_ids

    def unable(self) -> list[tuple[Sequence, NeverFits]]:
        """Return the sequences that cannot continue even alone since the budget was lowered, with the errors. The
        caller ends them."""
        found = list[tuple[Sequence, NeverFits]]()
        for seq in (*self.running.values(), *self.waiting) if self._is_lowered else ():
            try:
                self.kv.budget.check(self.kv.reservation(seq))
            except NeverFits as error:
                found.append((seq, error))
        return found

    def _admit(self, seq: Sequence, match: Match) -> NewSequence:
        """Start a waiting sequence with the stored blocks that match it. Return its data for the stages."""
        self.waiting.remove(seq)
        self.running[seq.seq_id] = seq
        takes_over = self.kv.begin(seq, match)
        blocks, prefix = tuple(block.block_id for block in match.blocks), seq.sent(0, match.num_tokens)
        params, num_prompt = seq.params.for_stages, seq.num_prompt_tokens
        return NewSequence(seq.seq_id, params, seq.seed, blocks, prefix, num_prompt, seq.pictures, takes_over)

    def _preempt(self, seq: Sequence) -> None:
        """Free a running sequence's KV and queue it again, with its tokens."""
        del self.running[seq.seq_id]
        self.batches.leave(seq)
        self.kv.preempt(seq, self.config.token_budget)
        self.speculation.forget(seq)
        seq.forget_stages()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.add(seq.seq_id)
        self.waiting.add(seq)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that waits or runs."""
        seq.finish_reason = reason
        self.speculation.forget(seq)
        self.deadlines.remove(seq)
        if self.waiting.get(seq.seq_id) is seq:
            self.waiting.remove(seq)
            self.prefix_cache.leave(seq)
            return
        del self.running[seq.seq_id]
        self.batches.leave(seq)
        self.kv.end(seq, is_alone=not (self.running or self.waiting))

    # -- the stages: lost, others, less memory -----------------------------------------------

    def requeue_all(self, kept: Iterable[DiskBlock] = ()) -> None:
        """Queue every running sequence again after the stages have lost everything except the blocks ``kept`` on disk.
        Its KV is computed again from its tokens. No sampled token is lost or sampled twice: the sequences have their
        tokens, and later tokens depend on nothing else."""
        self.in_flight.clear()
        self.kv.clear(kept)
        self.batches.clear()
        self._regroup()
        self._chunks.share = Share()
        for seq in self.running.values():
            self.speculation.forget(seq)
            seq.forget_stages()
            self.waiting.add(seq)
        self.running.clear()

    def moved_to(self, config: SchedulerConfig) -> "Scheduler":
        """Return a scheduler for other stages, which hold nothing yet, with all sequences in its queue. Call it after
        ``requeue_all``, and do not use this scheduler afterwards. Raise NeverFits, and change nothing, if a sequence is
        too large for one of those stages even when it runs alone."""
        for seq in self.waiting:
            config.check_fits(seq)
        new = Scheduler(config)
        new._now, new._next_step, new.deadlines = self._now, self._next_step, self.deadlines
        new.num_preemptions = self.num_preemptions
        for seq in self.waiting:
            new._queue(seq)
        return new

    def lower_budget(self, stage: int) -> bool:
        """Lower the budget of a stage whose device ran out of memory. Call it before ``requeue_all``. Return whether
        the budget changed; if not, trying again would fail for ever."""
        self._is_lowered = True
        return self.kv.lower(stage)

    def tune(self, policy_config: PolicyConfig, token_budget: int, max_running: int) -> None:
        """Change the rules from the next plan on. Running sequences continue."""
        self.config = replace(
            self.config, policy_config=policy_config, token_budget=token_budget, max_running=max_running
        )
        self._policy = Policy(policy_config)
        self._chunks.share = Share()

    # -- groups --------------------------------------------------------------------------------

    def _regroup(self, *, has_learned: bool = False) -> None:
        """Choose again, if that is due, how many groups decode in turn and which members get drafts. Then move members.
        ``has_learned``: whether the costs may have changed."""
        chooser, active, count = self.chooser, None, len(self.batches)
        if chooser.is_due(self.batches.ids, has_learned=has_learned):
            asked = {seq_id: self._member(seq) for seq_id, seq in self.batches.by_id().items()}
            chooser.choose(asked, self.config.policy_config.itl_slo, has_drafter=self.config.speculates)
            active = chooser.most_groups
            if chooser.choice is not None and count > 1:
                active = chooser.choice.groups
        self.batches.balance(active)

    def _member(self, seq: Sequence) -> Member:
        """Return a sequence's data for the choice of groups and drafts."""
        most = self.speculation.most_drafts if self.config.speculates else 0
        num_chosen = seq.num_generated - seq.drafts.num_jumped - seq.drafts.num_right
        return Member(len(seq.tokens), most, seq.flight, seq.drafts.num_jumped / max(1, num_chosen))

    # -- results -------------------------------------------------------------------------------

    def update(self, result: StepResult, returned_at: float = 0.0) -> list[TokenEvent]:
        """Take in the result of the oldest plan under way and return its tokens. ``learn`` then refines the costs,
        after the next launch. ``returned_at``: when the result came, in seconds on the first stage's clock.

        Raises:
            ValueError: the result does not answer that plan. The pipeline keeps order, so a peer is broken.
        """
        step = check_result(result, self.oldest, self.running)
        self.in_flight.popleft()
        self._now, self._returned_at = max(self._now, returned_at), returned_at
        events = self._tokens(step.plan, result)
        self.prefix_cache.learn(step.plan, result.figures)
        self.chooser.returned(step.plan)
        self._regroup()
        self._unlearned.append((step, result, returned_at))
        return events

    def learn(self) -> None:
        """Refine the stages' costs from the returned steps, then choose groups and drafts again. This can take
        milliseconds, so it runs after the next launch, which depends on neither."""
        if not self._unlearned:
            return
        while self._unlearned:
            step, result, returned_at = self._unlearned.popleft()
            self.costs.learn(step.plan.slices, result.figures, returned_at, step.idle_since)
        self._regroup(has_learned=True)

    def _tokens(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Append a plan's sampled tokens to its sequences. Return the events."""
        sampled = {one.seq_id: one for one in result.sampled}
        events, joining, decoding = list[TokenEvent](), list[Sequence](), self.batches.ids
        for part in plan.slices:
            seq = self.running.get(part.seq_id)
            if seq is None:
                continue  # it ended while this step was under way
            found = sampled.get(part.seq_id, _NO_TOKENS)
            if seq.is_ballot(part):
                seq.returned(part.start)
                seq.scored(found.scored)
                continue
            seq.returned(part.start, found.scored)
            seq.read = part.start + len(part.token_ids), self._now
            events += self._append(seq, part, found.tokens)
            if seq.finish_reason is not None:
                continue
            if found.drafts and found.tokens and seq.ballot is None:
                self.speculation.propose(seq, found.drafts)
            if part.num_logits and seq.seq_id not in decoding:
                joining.append(seq)
        for seq in joining:  # after ended sequences have left, so that groups stay equal
            self.batches.join(seq)
        return events

    def _append(self, seq: Sequence, part: Slice, tokens: tuple[SampledToken, ...]) -> list[TokenEvent]:
        """Append a slice's sampled tokens and return the events. This decides its drafts: all after a wrong one are
        rejected."""
        speculation = self.speculation
        if part.num_drafts and not tokens:  # the slice was rejected
            speculation.counts.rejected += 1
            return []
        alternatives: Texts = ()
        if seq.rules is not None:
            tokens, alternatives = self._before_ballot(seq, seq.rules, tokens)
        found = seq.extend([token.token_id for token in tokens], self.config.max_len, self._now)
        if found.verdicts:
            speculation.judged(seq.seq_id, part, found)
        events = [TokenEvent(seq.seq_id, token, None) for token in tokens[: len(seq.tokens) - found.first]]
        if found.reason is not None:
            events[-1] = replace(events[-1], finish_reason=found.reason)
            self._end(seq, found.reason)
        elif alternatives:
            seq.put_to_vote(alternatives)
        elif speculation.has_states and seq.drafts.were_planned and not seq.num_awaited:
            self.prefix_cache.store_full_blocks(seq, self.kv.used)  # only now is the state exact at their end
        return events

    def _before_ballot(
        self, seq: Sequence, rules: TokenRules, tokens: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], Texts]:
        """Return the sampled tokens up to a place where alternatives must be scored, and the alternatives. The token
        sampled there is only the likeliest beginning, so it is left out."""
        answer, longest = seq.answer, self.config.longest(seq) - len(seq.tokens)
        for count in range(len(tokens)):
            found = rules.alternatives([*answer, *(token.token_id for token in tokens[:count])])
            if found and count + max(map(len, found)) <= longest:
                return tokens[:count], found
        return tokens, ()

    # -- drafts ------------------------------------------------------------------------------

    def proposals(self) -> list[Proposal]:
        """Return the drafts that the next plan could contain, as a proposal for each of its sequences that gets some.
        Pass each, with its drafts, to ``take_drafts`` before the next ``schedule``. Asking twice is harmless."""
        if not self.config.speculates or self._is_full:
            return []
        self._jump_forward()
        order = self._groups_in_turn()
        for group in order:
            members = self.batches.members(group)
            if members and not self.batches.is_in_flight(group):
                waits = self._num_reading and not self._rules(group).decodes_go
                return [] if waits else self._proposals_of(members)
        if self._num_reading:
            return []
        for group in order:
            if found := self._proposals_of(self.batches.going_on(group, self.speculation.may_follow)):
                return found
        return []

    def _proposals_of(self, members: list[Sequence]) -> list[Proposal]:
        """Return the proposals for sequences of one step, as far as it has room. While a prompt is read, half the room
        is for it."""
        room = self.config.token_budget - sum(seq.num_to_compute for seq in members)
        return self.speculation.proposals(members, room // 2 if self._num_reading else room)

    def take_drafts(self, proposal: Proposal) -> None:
        """Take in the drafts made for a proposal: all, fewer or none. Results may have come since it was made."""
        if self.running.get(proposal.seq.seq_id) is proposal.seq:
            self.speculation.take(proposal)

    @property
    def drafts_next(self) -> list[Sequence]:
        """The sequences that will probably get drafts next, so that a drafter can read their prompts."""
        if not self.config.speculates:
            return []
        return [seq for seq in self.running.values() if self.speculation.is_likely(seq)]

    def _jump_forward(self) -> None:
        """Queue the tokens that the rules force as drafts."""
        for seq in self.running.values():
            if seq.rules is not None and seq in self.batches:
                self.speculation.jump_forward(seq)

    # -- plans out ---------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Return the next plan. Return None if there is nothing to do or no stage could take it. ``now``: seconds on
        the first stage's clock; it may change the content of a plan, but not whether there is one."""
        self._now = max(self._now, now)
        self._jump_forward()
        if self._is_full:
            return None
        plan = self._next_plan()
        if self._preempted:
            self._preempted.clear()
            self._regroup()
        return plan

    def _next_plan(self) -> StepPlan | None:
        has_prompts = bool(self.waiting or self._num_reading)
        for group in self._groups_in_turn():
            plan = self._plan_of(group) if self.batches.may_go(group, alone=has_prompts) else None
            if plan is not None:
                return plan
        if (further := self._further_blocks()) is not None:
            return further
        # Freed sequences, saves and fetches wait for the next slices. They go alone if no slices will follow, or if
        # one sequence gave up its KV for another that cannot go yet.
        will_come = self.running and self.in_flight and not self._preempted
        return self._issue() if self.kv.has_changes and not will_come else None

    def _plan_of(self, group: int) -> StepPlan | None:
        """Return a group's step by the policy's rules. Return None if it has nothing to do."""
        rules, num_awaiting = self._rules(group), len(self.prefix_cache.awaiting)
        plan = self._filled(group, rules)
        if plan is None and not (rules.decodes_go and not self.batches.members(group)):
            # No prompt can be read now, so decodes may go. Or no decode has KV, so prompts may take their rows.
            plan = self._filled(group, rules._replace(decodes_go=not rules.decodes_go))
        is_fetching = len(self.prefix_cache.awaiting) > num_awaiting
        return self._issue() if plan is None and is_fetching else plan

    def _filled(self, group: int, rules: PolicyDecision) -> StepPlan | None:
        """Return a step with the group's decodes, if the rules let them go, then chunks, as far as tokens and KV
        allow."""
        self.kv.begin_step()
        budget = self.config.token_budget
        going = self.batches.members(group) if rules.decodes_go else []
        num_decoding, kv_share = self._num_decoding, self._kv_share
        admissions = self._admissions() if rules.admits and self.waiting else []
        ready = [(seq, seq.num_scheduled) for seq in self.running.values() if seq.num_to_compute]
        ready += [(seq, match.num_tokens) for seq, match in admissions]
        # ``ready`` has the decodes of all groups: lower ranks must not take the KV that they need next.
        ready.sort(key=lambda one: one[0].precedence)
        decoding = self.batches.ids
        prompts = [one for one in ready if one[0].seq_id not in decoding]
        room, share = 0, Share()
        if prompts:
            room, share = self._chunks.room(self.config, rules, going, prompts, num_decoding, begins=bool(admissions))
        granted, chunks = self._allocate(ready, room, min(len(prompts), self.config.policy_config.max_partial_prefills))
        # Cut after allocating KV: a sequence without KV must not take the place of one that could go.
        able = [seq for seq in going if seq.seq_id in granted]
        rows = list(accumulate([seq.num_rows for seq in able], initial=0))
        most_decodes = max(1, bisect_right(rows, budget) - 1)  # a text that is scored may be longer: alone
        decodes, late = able[:most_decodes], able[most_decodes:]
        # Without a slice, an admitted sequence would hold blocks that could be evicted before their first use.
        beginning = {seq.seq_id for seq, _ in chunks}
        admissions = [one for one in admissions if one[0].seq_id in beginning]
        if not decodes and not chunks:
            return None
        work = [(seq, 1) for seq in decodes] + chunks
        room = budget - rows[len(decodes)] - sum([size for _, size in chunks])
        drafts = self._allocate_drafts(decodes, room)
        if chunks:
            drafts |= self._allocate_jumps(chunks, dict(prompts), room - sum(drafts.values()))
        self._chunks.note(share, has_chunks=bool(chunks))
        self.batches.had_turn(group, late)
        self._policy.scheduled(num_decoding, kv_share)
        return self._issue(admissions, work, drafts)

    def _admissions(self) -> list[Admission]:
        """Return the waiting sequences that may start with this step, as many as fill it, with their matches."""
        config, found = self.config, list[Admission]()
        room = rows = config.token_budget
        for seq, match in self.kv.admissible(self.waiting, self.running.values(), config.max_running, rows):
            found.append((seq, match))
            if not seq.num_to_score:
                start = match.num_tokens
                room -= min(len(seq.tokens) - start, longest_chunk(start, rows))
            if room <= 0 and len(found) >= config.policy_config.max_partial_prefills:
                break
        return found

    def _allocate(
        self, ready: Iterable[PromptFrom], room: int, side_by_side: int
    ) -> tuple[set[int], list[SequenceWork]]:
        """Promise KV by rank and cut chunks. Return the ids of the sequences that may decode, and the chunks.
        ``side_by_side``: the number of prompts that share the room."""
        granted, chunks, room_to_score, decoding = set[int](), list[SequenceWork](), _MOST_SCORED, self.batches.ids
        quota = max(room // side_by_side, LEAST_CHUNK) if side_by_side > 1 else room
        for seq, start in ready:
            if seq.seq_id in self._preempted:
                continue
            if seq.seq_id in decoding:
                if self._promise(seq, start + seq.num_rows):
                    granted.add(seq.seq_id)
                continue
            size = min(len(seq.tokens) - start, room, quota, longest_chunk(start, self.config.token_budget))
            if chunks and size < min(len(seq.tokens) - start, self.config.min_chunk):
                room = 0  # a small chunk of a further prompt costs more than it saves
            if seq.num_to_score:
                size = min(size, room_to_score)
            if room <= 0 or size <= 0:
                continue
            size = self._cut(seq, start, size)
            if not self._promise(seq, start + size):
                room = 0  # lower ranks must not take the KV that this one lacks
                continue
            chunks.append((seq, size))
            room, room_to_score = room - size, room_to_score - size * bool(seq.num_to_score)
        return granted, chunks

    def _promise(self, seq: Sequence, end: int) -> bool:
        """Promise a sequence KV for ``end`` tokens, by eviction and preemption if needed. Return whether there is
        room."""
        victims = self.kv.allocate(seq, end, self.running.values())
        for one in victims or ():
            self._preempt(one)
        return victims is not None

    def _cut(self, seq: Sequence, start: int, size: int) -> int:
        """Return the size of a chunk, reduced to where a chunk may end or extended to the end of a picture."""
        if self.config.blocks.whole_blocks:
            block = self.kv.budget.block
            size = min(size, block - start % block)  # the cache stores the state at the block's end
        return chunk_end(seq.pictures, start, start + size) - start

    def _allocate_drafts(self, decodes: Seq[Sequence], room: int) -> dict[int, int]:
        """Return how many waiting drafts go with each sequence. There must be room, and memory without eviction or
        preemption, also for the next tokens of sequences in other steps."""
        drafts, drafted = dict[int, int](), [seq for seq in decodes if seq.drafts.waiting]
        if not drafted:
            return drafts
        taken, growth = {seq.seq_id for seq in decodes}, self.kv.budget.growth
        others = [one for one in self.running.values() if one.seq_id not in taken and one.num_awaited]
        reserve = sum((growth(one.kv_tokens, len(one.tokens) + 1) for one in others), NOTHING)
        for seq in sorted(drafted, key=lambda one: one.precedence):
            end = max(seq.num_scheduled, len(seq.tokens))
            for count in range(min(len(seq.drafts.waiting), room), 0, -1):
                if self.kv.allocate_spare(seq.kv_tokens, end + count, reserve):
                    drafts[seq.seq_id] = count
                    room -= count
                    break
        return drafts

    def _allocate_jumps(
        self, chunks: Iterable[SequenceWork], starts: Mapping[Sequence, int], room: int
    ) -> dict[int, int]:
        """Send the tokens that the rules force after prompts that end in this step, as drafts. Return how many go with
        each sequence. There must be room, and memory without eviction or preemption."""
        jumps = dict[int, int]()
        for seq, size in chunks:
            end = len(seq.tokens)
            if seq.rules is None or starts[seq] + size < end:
                continue
            tokens = list(self.speculation.opening(seq)[:room])
            while tokens and not self.kv.allocate_spare(end, end + len(tokens)):
                tokens.pop()
            if tokens:
                seq.jump_forward(tokens)
                jumps[seq.seq_id] = len(tokens)
                room -= len(tokens)
        return jumps

    def _further_blocks(self) -> StepPlan | None:
        """Return a step of a group that has steps under way: drafts after its members' blocks, and the first blocks of
        members whose blocks under way are all rejected. Return None if there are none."""
        budget = self.config.token_budget
        for group in self._groups_in_turn():
            self.kv.begin_step()
            num_decoding, kv_share, decodes = self._num_decoding, self._kv_share, list[Sequence]()
            for seq in sorted(self.batches.going_on(group, self._follows), key=lambda one: one.precedence):
                if seq.seq_id in self._preempted:
                    continue  # an earlier sequence of this loop took its KV
                if seq.num_awaited or self._promise(seq, seq.num_scheduled + seq.num_rows):
                    decodes.append(seq)
            rows = list(accumulate([seq.num_rows if seq.num_to_compute else 0 for seq in decodes], initial=0))
            decodes = decodes[: bisect_right(rows, budget) - 1]
            drafts = self._allocate_drafts(decodes, budget - rows[len(decodes)])
            work = [(seq, seq.num_to_compute) for seq in decodes if seq.num_to_compute or seq.seq_id in drafts]
            if work:
                self._chunks.note(Share(), has_chunks=False)
                self.batches.had_turn(group, ())
                self._policy.scheduled(num_decoding, kv_share)
                return self._issue((), work, drafts)
        return None

    def _follows(self, seq: Sequence) -> bool:
        """Return whether a sequence has a waiting block that may go after its blocks under way."""
        return bool(seq.drafts.waiting) and self.speculation.may_follow(seq)

    def _issue(
        self,
        admissions: Iterable[Admission] = (),
        work: Iterable[SequenceWork] = (),
        drafts: Mapping[int, int] = _NO_DRAFTS,
    ) -> StepPlan:
        """Make the next plan: admit sequences, and compute the next known tokens of some, with drafts after them."""
        new = tuple(self._admit(seq, match) for seq, match in admissions)
        saves, dropped, fetches, erased = self.prefix_cache.take_changes()
        if new or fetches:
            self.kv.free_retained()
        freed, retained = self.kv.take_ended()
        slices = tuple([self._slice(seq, size, drafts.get(seq.seq_id, 0)) for seq, size in work])
        plan = StepPlan(self._next_step, new, slices, freed, saves, dropped, fetches, erased, retained)
        self._next_step += 1
        for part in slices:
            self.prefix_cache.store_full_blocks(self.running[part.seq_id], self.kv.used)
        self.in_flight.append(StepInFlight(plan, self._idle_since(plan, drafts)))
        return plan

    def _slice(self, seq: Sequence, size: int, num_drafts: int) -> Slice:
        """Return a slice of the next ``size`` known tokens, with ``num_drafts`` drafts after them."""
        start, before = seq.num_scheduled, seq.kv_tokens
        end = start + size
        scores = seq.ballot is not None and seq in self.batches
        token_ids = seq.go_scoring(self._now) if scores else seq.go(size, num_drafts, self._now)
        growth = self.kv.budget.growth(before, seq.kv_tokens)
        if growth is not NOTHING:
            self.kv.used += growth
        if scores:
            assert seq.ballot is not None
            return Slice(seq.seq_id, start, token_ids, 0, scored=seq.ballot.next)
        num_logits, num_next = int(end == len(seq.tokens)), 0
        if num_drafts:
            num_logits = min(num_drafts + 1, len(token_ids))
            self.speculation.counts.blocks += 1
            self.speculation.counts.sent += num_drafts
        if num_logits and self.config.drafts_at_end:
            num_next = self.speculation.num_next(seq)
        scored = seq.sent(start + 1, min(end, seq.num_prompt_tokens - 1) + 1) if seq.num_to_score else ()
        return Slice(seq.seq_id, start, token_ids, num_logits, num_drafts, num_next, scored)

    # -- what a step depends on ----------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        """Whether no further plan may be under way now."""
        count, config = len(self.in_flight), self.config
        return count >= config.max_in_flight or (count >= config.num_groups and self._num_decoding > 0)

    @property
    def _num_decoding(self) -> int:
        """The number of sequences that decode, or will when a result under way arrives: steps planned now delay their
        next token."""
        return len(self.running) - self._num_reading

    @property
    def _num_reading(self) -> int:
        """The number of admitted sequences with prompt tokens that are in no plan yet."""
        decoding = self.batches.ids
        if len(decoding) == len(self.running):
            return 0
        return sum([seq.num_to_compute > 0 for seq_id, seq in self.running.items() if seq_id not in decoding])

    @property
    def _kv_share(self) -> float:
        """The share of KV memory in use for ``watermark``; 0 for other policies."""
        fills = self.config.policy_config.policy is PolicyName.WATERMARK
        return self.kv.budget.share(self.kv.used) if fills else 0.0

    def _rules(self, group: int) -> PolicyDecision:
        """Return what the group's step may do under the policy."""
        waited = max([self._now - seq.token_at for seq in self.batches.members(group)], default=0.0)
        return self._policy.decide(self._num_decoding, waited)

    def _groups_in_turn(self) -> list[int]:
        """Return all groups in scheduling order: groups with waiting drafts first, then by turn."""
        groups = self.batches.in_turn()
        have = {seq.seq_id for seq in self.running.values() if seq.drafts.waiting}
        if not have:
            return groups
        return sorted(groups, key=lambda group: all(seq.seq_id not in have for seq in self.batches.members(group)))

    def _idle_since(self, plan: StepPlan, drafts: Mapping[int, int]) -> float | None:
        """Return when the coordinator had nothing left to do but ``plan``, a step of decodes and drafts: after the last
        result and the drafting that followed it if no other step is under way, else now if it has new ``drafts``.
        Return None if that is unknown, or the plan has other rows."""
        if not plan.has_only_logits:
            return None
        if self._returned_at and not self.in_flight:
            rounds = 0 if self.config.drafts_at_end else max(drafts.values(), default=0)
            return self._returned_at + self.costs.drafting(len(drafts), rounds)
        return self._now if drafts else None

    # -- questions -----------------------------------------------------------------------------

    def predicted(self, plan: StepPlan) -> float | None:
        """Return the seconds after which a plan's result is due if nothing else is under way. Return None if that is
        unknown, as for a plan that reads blocks from disks."""
        return None if plan.fetches else self.costs.predicted(Shape.of(plan.slices))

    @property
    def oldest(self) -> StepInFlight | None:
        """The step that has been in flight longest."""
        return self.in_flight[0] if self.in_flight else None

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs or waits, and no plan is needed to free KV."""
        return not (self.waiting or self.running or self.in_flight or self.kv.has_changes)
