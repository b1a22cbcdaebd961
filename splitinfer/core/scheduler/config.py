"""The scheduler's limits and rules. The engine makes them once it knows the stages."""

from dataclasses import dataclass, field

from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.scheduler.microbatches import MIN_CHUNK
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.sequence import Sequence
from splitinfer.errors import QueueFull


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's limits and rules.

    num_groups: the most micro-batches that decode in turn; as many as stages.
    fixed_groups: whether there are always that many; otherwise fewer if that is faster.
    max_in_flight: plans under way while no sequence decodes.
    token_budget: the most tokens in a step.
    max_running: the most sequences that run at a time.
    max_len: the most tokens in a sequence (the model's context).
    max_waiting: the most requests in the queue.
    kv: the stages' KV memory and the size of its blocks; ``None``: no bound.
    blocks: which blocks are cached; if only whole blocks can be used, chunks end at block boundaries.
    speculates: whether there is a drafter.
    drafts_at_end: whether the last stage makes the drafts, after the step whose tokens they follow.
    drafts_at_once: the most drafts that a round of it makes; 0: one.
    with_ngrams: whether n-grams replace the last stage's drafts where they are as good.
    num_stages: 0 stands for one per group.
    rewind: tokens by which every stage's caches can be rolled back (``core.kv.rewind``).
    min_chunk: prompt tokens; a smaller further chunk costs more than it saves.
    policy_config: whether prompts or decodes go first (``core.scheduler.policy``).

    Raises:
        ValueError: a limit is below 1.
    """

    num_groups: int
    max_in_flight: int
    token_budget: int
    max_running: int
    max_len: int
    max_waiting: int = 1024
    kv: KVBudget | None = None
    blocks: PrefixCacheConfig = field(default_factory=PrefixCacheConfig)
    speculates: bool = False
    drafts_at_end: bool = False
    drafts_at_once: int = 0
    with_ngrams: bool = False
    num_stages: int = 0
    rewind: int | None = None
    policy_config: PolicyConfig = field(default_factory=PolicyConfig)
    fixed_groups: bool = False
    min_chunk: int = MIN_CHUNK

    def __post_init__(self) -> None:
        for name in ("num_groups", "max_in_flight", "token_budget", "max_running", "max_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def check_room(self, seq: Sequence, num_waiting: int) -> None:
        """Check that ``seq`` may wait beside ``num_waiting`` others and that it will fit. Safe to call from any thread.

        Raises:
            QueueFull: too many requests wait already.
            NeverFits: its KV is too large for a stage even when it runs alone.
        """
        if num_waiting >= self.max_waiting:
            raise QueueFull(f"{num_waiting:,} requests are waiting already, which is the most; try again later")
        self.check_fits(seq)

    def check_fits(self, seq: Sequence) -> None:
        """Raise NeverFits if the KV of ``seq`` at its longest is too large for a stage even when it runs alone."""
        if self.kv is not None:
            self.kv.check(self.longest(seq))

    def longest(self, seq: Sequence) -> int:
        """Return the most tokens that a sequence can reach, prompt and answer together."""
        return max(seq.num_prompt_tokens, min(seq.num_prompt_tokens + seq.params.max_tokens, self.max_len))
