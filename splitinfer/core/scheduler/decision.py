"""What the next plan would do. The planner returns it and changes nothing; the scheduler applies it."""

from dataclasses import dataclass, field

from splitinfer.core.kv.block_tree import Block, Match
from splitinfer.core.scheduler.kv_allocation import KVAllocation
from splitinfer.core.scheduler.policy import PolicyInput
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that is admitted, and the stored blocks that its prefix matches."""

    seq: Sequence
    match: Match

    @property
    def candidate(self) -> "Candidate":
        """The candidate for its first slice."""
        return Candidate(self.seq, self.match.num_tokens, 0, decodes=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could get a slice of its tokens from ``start`` on; its KV has room for ``kv_tokens``."""

    seq: Sequence
    start: int
    kv_tokens: int
    decodes: bool

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return len(self.seq.tokens) - self.start


@dataclass(slots=True)
class Decision:
    """What the next plan will do; making it changes nothing."""

    allocation: KVAllocation
    group: int = 0
    situation: PolicyInput | None = None  # by which the policy decided; ``None``: it has no slices
    admissions: list[Admission] = field(default_factory=list)
    fetching: list[tuple[Sequence, tuple[Block, ...]]] = field(default_factory=list)  # blocks to read from disk
    decodes: list[Sequence] = field(default_factory=list)
    late: list[Sequence] = field(default_factory=list)  # members of the group that exceed the step's token budget
    drafts: dict[int, int] = field(default_factory=dict)  # how many, behind decodes and prompts, by sequence
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # sequence, number of prompt tokens
    forced: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # tokens behind prompts that end in it
    share: int = 0
    share_left: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the stages compute."""
        known = sum(seq.num_to_compute for seq in self.decodes) + sum(size for _, size in self.chunks)
        return known + sum(self.drafts.values())

    @property
    def has_slices(self) -> bool:
        """Whether the stages compute anything."""
        return bool(self.decodes or self.chunks)

    @property
    def does_something(self) -> bool:
        """Whether a plan is needed for it."""
        return self.has_slices or bool(self.fetching)
