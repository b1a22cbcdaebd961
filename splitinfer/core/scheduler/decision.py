"""What the next plan would do. Made by deciding, thrown away by asking, carried out by scheduling."""

from dataclasses import dataclass, field

from splitinfer.core.kv.block_tree import Block, Match
from splitinfer.core.scheduler.kv_allocation import KVAllocation
from splitinfer.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins to run, with stored KV as far as it matches."""

    seq: Sequence
    match: Match

    @property
    def candidate(self) -> "Candidate":
        """Its first slice, if it gets one."""
        return Candidate(self.seq, self.match.num_tokens, 0, decodes=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could have a slice: its tokens from ``start``; its KV has place for ``kv_tokens``."""

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
    """What the next plan will do; nothing of it has happened."""

    allocation: KVAllocation
    group: int = 0
    admissions: list[Admission] = field(default_factory=list)
    fetching: list[tuple[Sequence, tuple[Block, ...]]] = field(default_factory=list)  # who waits for blocks on disk
    decodes: list[Sequence] = field(default_factory=list)
    late: list[Sequence] = field(default_factory=list)  # members of the group for whom the step has no place
    num_drafts: int = 0  # behind the one decode there is
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with their numbers of tokens
    share: int = 0
    share_left: int = 0

    @property
    def has_slices(self) -> bool:
        """Whether the stages compute anything."""
        return bool(self.decodes or self.chunks)

    @property
    def does_something(self) -> bool:
        """Whether it is worth a plan."""
        return self.has_slices or bool(self.fetching)
