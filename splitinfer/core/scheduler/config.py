"""What a scheduler may do at most, and by which rules. Told once, by whoever knows the stages."""

from dataclasses import dataclass, field

from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.scheduler.policy import PolicyConfig
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's bounds.

    ``num_groups`` micro-batches that decode in turn, as many as stages; ``max_in_flight`` plans under way while
    nobody decodes; ``token_budget`` tokens at most in a step; ``max_running`` sequences with KV that is growing;
    ``max_len`` tokens in a sequence (the model's context); ``max_waiting`` requests in the queue; ``kv`` the stages'
    memory (``None``: no bound); ``blocks``: what of it is kept. Where only whole blocks can be used, chunks end with
    them. ``speculates``: whether somebody drafts, for ``num_stages`` (0: one for each group) whose caches go back
    ``rewind`` tokens (``core.kv.rewind``). ``knobs``: who goes first (``core.scheduler.policy``).
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
    num_stages: int = 0
    rewind: int | None = None
    policy_config: PolicyConfig = field(default_factory=PolicyConfig)

    def __post_init__(self) -> None:
        for name in ("num_groups", "max_in_flight", "token_budget", "max_running", "max_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def check_fits(self, seq: Sequence) -> None:
        """Raise ``NeverFits`` if the KV of ``seq`` at its longest is too large for a stage even when alone.

        May be called from any thread: it looks at nothing but its arguments.
        """
        if self.kv is not None:
            self.kv.check(self.longest(seq))

    def longest(self, seq: Sequence) -> int:
        """Tokens that a sequence has at most."""
        return max(seq.num_prompt_tokens, min(seq.num_prompt_tokens + seq.params.max_tokens, self.max_len))
