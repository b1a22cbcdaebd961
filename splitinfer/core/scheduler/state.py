"""A scheduler's state between two events. The scheduler changes it; admission and the planner only read it."""

from collections import deque
from dataclasses import dataclass, field

from splitinfer.core.costs.model import CostModel
from splitinfer.core.kv.budget import NOTHING, KVBudget, KVUse
from splitinfer.core.kv.prefix_cache import PrefixCache
from splitinfer.core.kv.rewind import UNLIMITED
from splitinfer.core.plan import StepPlan
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.decision import Admission, Decision
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.kv_allocation import KVAllocation
from splitinfer.core.scheduler.microbatches import MicroBatches
from splitinfer.core.scheduler.policy import Policy, PolicyInput
from splitinfer.core.scheduler.waiting_queue import WaitingQueue
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.chooser import Chooser, Member
from splitinfer.core.speculation.speculation import Speculation


@dataclass(slots=True)
class SchedulerState:
    """The queue, the running sequences, the plans under way, and what is known of the stages.

    in_flight: the steps under way, oldest first.
    freed: ids of sequences whose KV the next plan frees.
    left: the sequence that ended last, alone, as long as nothing runs: the stages keep its KV for the next turn of its
        conversation. newly_left: its id, for the next plan.
    used: the KV of all running sequences.
    now, returned_at: the latest known time and the last result's, in seconds on the first stage's clock.
    share, share_left: prompt tokens for each step of this round, and how many of its steps are still to come.
    prompts_go_on: consecutive steps with prompts in them.
    """

    config: SchedulerConfig
    policy: Policy
    costs: CostModel
    prefix_cache: PrefixCache
    batches: MicroBatches
    speculation: Speculation | None
    chooser: Chooser
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: dict[int, Sequence] = field(default_factory=dict)
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    freed: list[int] = field(default_factory=list)
    left: Sequence | None = None
    newly_left: list[int] = field(default_factory=list)
    used: KVUse = NOTHING
    now: float = 0.0
    returned_at: float = 0.0
    share: int = 0
    share_left: int = 0
    prompts_go_on: int = 0

    @property
    def budget(self) -> KVBudget:
        """The memory of sequences and of stored blocks; as configured, or less (``Scheduler.lower_budget``)."""
        return self.prefix_cache.budget

    @property
    def has_changes(self) -> bool:
        """Whether the stages have something to do even without slices."""
        return bool(self.freed or self.newly_left) or self.prefix_cache.has_changes

    @property
    def is_full(self) -> bool:
        """Whether no further plan may be under way now."""
        count, config = len(self.in_flight), self.config
        return count >= config.max_in_flight or (count >= config.num_groups and self.num_decoding > 0)

    @property
    def num_decoding(self) -> int:
        """Sequences that decode, or will when a result under way arrives: steps planned now delay its next token."""
        joining = (seq not in self.batches and not seq.num_to_compute for seq in self.running.values())
        return len(self.batches) + sum(joining)

    @property
    def goes_back(self) -> bool:
        """Whether KV can be rolled back to any token."""
        return self.config.rewind is UNLIMITED and not self.config.blocks.whole_blocks

    @property
    def left_use(self) -> KVUse:
        """The KV of the sequence that is left."""
        return NOTHING if self.left is None else self.budget.use_of(self.left.kv_tokens)

    def left_for(self, new: Admission) -> Sequence | None:
        """The sequence that is left, if its KV is that of the tokens that a new one need not compute, and goes back to
        their end. It must not have grown beyond what is reserved for the new one."""
        left, end = self.left, new.match.num_tokens
        if left is None or not 0 < end <= left.num_sure or left.kv_tokens > len(new.seq.tokens):
            return None
        is_at_end = end == left.num_scheduled
        return left if (is_at_end or self.goes_back) and left.tokens[:end] == new.seq.tokens[:end] else None

    def policy_input(self, group: int) -> PolicyInput:
        """The policy's input for the step of a group."""
        share = self.budget.share(self.used)
        waited = max((self.now - seq.token_at for seq in self.batches.members(group)), default=0.0)
        return PolicyInput(self.num_decoding, share, waited)

    def allocation(self) -> KVAllocation:
        """A KV allocation for one more plan, with nothing allocated yet."""
        prefix_cache = self.prefix_cache
        used = self.used + prefix_cache.use
        return KVAllocation(self.budget, used, prefix_cache.evictable(), self.running.values(), prefix_cache.pinned)

    def idle_since(self, plan: StepPlan, drafts: list[int]) -> float | None:
        """From when on the coordinator had only a step of decodes and drafts to do: since the last result, and the
        drafts made after it, where no other step is under way; else since now, where it has new ``drafts``."""
        if not plan.has_only_logits:
            return None
        if self.returned_at and not self.in_flight:
            rounds = 0 if self.config.drafts_at_end else max(drafts, default=0)
            return self.returned_at + self.costs.drafting(len(drafts), rounds)
        return self.now if drafts else None

    @property
    def speculates(self) -> bool:
        """Whether plans may contain drafts."""
        return self.speculation is not None

    @property
    def reads_prompts(self) -> bool:
        """Whether a sequence that was admitted has prompt tokens that are in no plan yet."""
        return any(seq.num_to_compute and seq not in self.batches for seq in self.running.values())

    def note(self, decision: Decision) -> None:
        """Note what the next decisions go by: the round's share, the turn, the policy's state, the groups."""
        if decision.admissions and not decision.has_slices:
            self.share_left = 0
        if decision.situation is not None and decision.has_slices:
            self.share, self.share_left = decision.share, decision.share_left
            self.batches.had_turn(decision.group, decision.late)
            self.policy.scheduled(decision.situation)
            self.prompts_go_on = self.prompts_go_on + 1 if decision.chunks else 0
        if decision.allocation.preempted:
            self.regroup()

    def configure(self, config: SchedulerConfig) -> None:
        """Go by other rules from the next plan on."""
        self.config, self.policy, self.share_left = config, Policy(config.policy_config), 0

    def fix_groups(self, count: int | None) -> None:
        """See ``Scheduler.fix_groups``."""
        self.chooser.most_groups = self.config.num_groups if count is None else min(count, self.config.num_groups)
        self.chooser.fixed = self.config.fixed_groups or count is not None
        self.chooser.choose({}, None, has_drafter=False)
        self.regroup()

    def regroup(self, *, has_learned: bool = False) -> None:
        """Choose again, if that is due, how many groups decode in turn and which members get drafts; move members.
        ``has_learned``: the costs may have changed."""
        members, chooser, active = self.batches.by_id(), self.chooser, None
        if chooser.is_due(frozenset(members), has_learned=has_learned):
            asked = {seq_id: self._member(seq) for seq_id, seq in members.items()}
            chooser.choose(asked, self.config.policy_config.itl_slo, has_drafter=self.config.speculates)
            active = chooser.most_groups
            if chooser.choice is not None and len(members) > 1:
                active = chooser.choice.groups
        if self.speculation is not None:
            self.speculation.are_several = len(members) > 1
        self.batches.balance(active)

    def _member(self, seq: Sequence) -> Member:
        """A sequence as the choice of groups and drafts sees it."""
        most = 0 if self.speculation is None or not self.config.speculates else self.speculation.most_drafts
        num_chosen = seq.num_generated - seq.drafts.num_forced - seq.drafts.num_right
        return Member(len(seq.tokens), most, seq.flight, seq.drafts.num_forced / max(1, num_chosen))
