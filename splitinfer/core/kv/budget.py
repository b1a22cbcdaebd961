"""How much KV fits on the stages: arithmetic on counts, which only ``StageKV`` converts to bytes.

On each stage a sequence takes a fixed part (sliding windows and recurrent states, counted as full) and a part that
grows with its tokens as its caches do (``core.kv.growth``): by blocks, and by several blocks for a long sequence:

    bytes(n) = fixed + per_token * mean_room(n)         0 for n = 0: nothing is allocated

A block of the prefix cache (``core.kv.block_tree``) takes ``stored`` bytes, full or not: its tokens' part of all caches
that grow, sliding windows included, and a copy of the states that do not.

Stages differ in these factors but not in the counts. Three numbers (``KVUse``) give the memory of any set of sequences
and stored blocks on each stage. So one sum serves all stages, and the fullest stage decides.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Self

from splitinfer.core.kv.growth import BLOCK as BLOCK
from splitinfer.core.kv.growth import mean_room

KV_SHARE = 0.5  # of the free memory, for KV; the rest is for activations, padding and rebuilding batches
STAGE_MARGIN = 256 * 2**20  # bytes of a stage beside weights and KV: activations, buffers and the interpreter
_STAYS = 0.75  # of the memory in use when a device ran out of it


@dataclass(frozen=True, slots=True)
class KVUse:
    """The KV of ``sequences`` with room for ``tokens`` in all, in whole blocks, and of ``stored`` blocks in the prefix
    cache."""

    sequences: int = 0
    tokens: int = 0
    stored: int = 0

    def __add__(self, other: Self) -> "KVUse":
        return KVUse(self.sequences + other.sequences, self.tokens + other.tokens, self.stored + other.stored)

    def __sub__(self, other: Self) -> "KVUse":
        return KVUse(self.sequences - other.sequences, self.tokens - other.tokens, self.stored - other.stored)


NOTHING = KVUse()
STORED_BLOCK = KVUse(stored=1)


@dataclass(frozen=True, slots=True)
class StageKV:
    """One stage's KV memory in bytes: the budget, and what each token of a sequence, each sequence of any length, and
    each stored block takes.

    Raises:
        ValueError: a number is negative.
    """

    budget_bytes: int
    per_token: int
    fixed: int = 0
    stored: int = 0

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "per_token", "fixed", "stored"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")

    def bytes_of(self, use: KVUse) -> int:
        """Return the bytes of ``use`` on this stage."""
        return self.fixed * use.sequences + self.per_token * use.tokens + self.stored * use.stored


class NeverFits(ValueError):
    """Raised if a request's KV is too large for a stage even when no other request runs. ``num_tokens``: the request's
    tokens at its longest; ``needed``, ``there``: bytes on stage ``stage``."""

    def __init__(self, num_tokens: int, stage: int, needed: int, there: int) -> None:
        self.num_tokens, self.stage, self.needed, self.there = num_tokens, stage, needed, there
        super().__init__(
            f"{num_tokens} tokens (prompt and answer) need {needed} bytes of KV on stage {stage}, which has {there}"
        )


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The KV memory of all stages, in order, counted in blocks of ``block`` tokens. Without stages it is unlimited."""

    stages: tuple[StageKV, ...] = ()
    block: int = BLOCK

    def use_of(self, num_tokens: int) -> KVUse:
        """Return what one sequence with KV of ``num_tokens`` tokens uses.

        >>> use_of = KVBudget().use_of
        >>> use_of(0) == NOTHING, use_of(1) == KVUse(1, 256), use_of(257) == KVUse(1, 512)
        (True, True, True)
        """
        return KVUse(1, mean_room(num_tokens, self.block)) if num_tokens else NOTHING

    def growth(self, before: int, after: int) -> KVUse:
        """Return what a sequence uses in addition if its KV grows from ``before`` to ``after`` tokens. KV never
        shrinks."""
        # This is called for each decode in each step, and nearly every decode stays inside its block.
        if after <= before or (before and (after - 1) // self.block == (before - 1) // self.block):
            return NOTHING
        return self.use_of(after) - self.use_of(before)

    def fits(self, use: KVUse) -> bool:
        """Return whether every stage has room for ``use``."""
        return all(stage.bytes_of(use) <= stage.budget_bytes for stage in self.stages)

    def share(self, use: KVUse) -> float:
        """Return the share of memory that ``use`` takes on the fullest stage; 0 without a bound.

        >>> KVBudget((StageKV(4 * BLOCK, 1), StageKV(2 * BLOCK, 1))).share(KVUse(1, BLOCK))
        0.5
        """
        return max((stage.bytes_of(use) / max(stage.budget_bytes, 1) for stage in self.stages), default=0.0)

    def check(self, num_tokens: int) -> None:
        """Raise NeverFits if a sequence of ``num_tokens`` tokens does not fit even when it runs alone. The error names
        the stage that lacks most."""
        use = self.use_of(num_tokens)
        lacks = [(stage.bytes_of(use) - stage.budget_bytes, index) for index, stage in enumerate(self.stages)]
        lack, index = max(lacks, default=(0, 0))
        if lack > 0:
            raise NeverFits(num_tokens, index, self.stages[index].bytes_of(use), self.stages[index].budget_bytes)

    def longest(self, most: int) -> int:
        """Return the most tokens, up to ``most``, of a sequence that fits when it runs alone, in whole blocks if fewer.
        It is at least one block; a request that does not fit even then is refused with the numbers.

        >>> KVBudget((StageKV(9 * BLOCK, 1), StageKV(5 * BLOCK, 1))).longest(100_000) // BLOCK, KVBudget().longest(7)
        (5, 7)
        """
        if self.fits(self.use_of(most)):
            return most
        size = self.block
        blocks = bisect_left(range(1, -(-most // size)), True, key=lambda n: not self.fits(self.use_of(n * size)))
        return max(blocks, 1) * size

    def lowered(self, stage: int, use: KVUse) -> "KVBudget":
        """Return the budget after the device of ``stage`` ran out of memory with ``use``: there it becomes three
        quarters of ``use``.

        >>> KVBudget((StageKV(9 * BLOCK, 1),)).lowered(0, KVUse(1, 4 * BLOCK)) == KVBudget((StageKV(3 * BLOCK, 1),))
        True
        """
        stages = list(self.stages)
        for there in stages[stage : stage + 1]:
            stages[stage] = replace(there, budget_bytes=int(_STAYS * min(there.budget_bytes, there.bytes_of(use))))
        return replace(self, stages=tuple(stages))
