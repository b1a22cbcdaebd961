"""What the prefix cache notes of a sequence. New whenever the stages have nothing of it."""

from dataclasses import dataclass, field

from splitinfer.core.kv.block_tree import Block


@dataclass(slots=True)
class CachedKV:
    """A sequence's cached blocks.

    num_reused: tokens whose KV came from cached blocks when it was admitted.
    blocks: cached blocks of its tokens, from the first on.
    is_stored: whether its next block can be cached, because all before it are.
    awaits: blocks being read from disk that it waits for.
    has_fetched: whether it has requested blocks on disk.
    """

    num_reused: int = 0
    blocks: list[Block] = field(default_factory=list)
    is_stored: bool = True
    awaits: list[Block] = field(default_factory=list)
    has_fetched: bool = False
