"""The tree of token blocks that have KV on every stage. Only the coordinator has it.

    root ─┬─ [0, 256) "You are …" ─┬─ [256, 512) ─── [512, 600)     a conversation; its last block is partial
          │                        └─ [256, 512)'                   another with the same system prompt
          └─ [0, 40)

A node is one block: up to ``block`` tokens that follow its parent's tokens. Only full blocks have children. Stages
store a block's KV under its id and do as plans tell them. Only this tree decides which blocks exist, so stages never
have to agree: every pipeline that let each rank match on its own shipped a deadlock or wrong tokens. Keys are chained
hashes (after vLLM's automatic prefix caching): a key stands for the block's tokens and all tokens before them.

Leaves are evicted first, the least recently used first, because a block is useless without those before it. Using a
block uses all blocks before it: once its children are gone, a block counts as used as recently as the last of them.
"""

import hashlib
import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from splitinfer.core.kv.budget import BLOCK

Key = bytes  # a hash of a block's tokens and all tokens before them
KEY_BYTES = 16


def chained(parent: Key, tokens: Iterable[int]) -> Key:
    """Return the key of a block with these ``tokens`` after the block with key ``parent``."""
    text = ",".join(map(str, tokens)).encode()
    return hashlib.blake2b(parent + text, digest_size=KEY_BYTES).digest()


def full_keys(root: Key, tokens: Sequence[int], block: int = BLOCK) -> tuple[Key, ...]:
    """Return the keys of the full blocks at the beginning of ``tokens``.

    >>> [len(full_keys(b"", range(n))) for n in (255, 256, 700)]
    [0, 1, 2]
    """
    keys, key = [], root
    for start in range(0, len(tokens) - block + 1, block):
        key = chained(key, tokens[start : start + block])
        keys.append(key)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block on disk: its ``tokens``, and the key of the block before it."""

    parent: Key
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    """A node: ``tokens`` after the ``start`` tokens of its ancestors. Equal only to itself.

    ``ends``: a request has ended here. ``is_full``: other blocks may follow it. ``is_here``: it has not been removed.
    ``is_coming``: it is being read from disk, so no sequence can begin with it yet.
    """

    block_id: int
    key: Key
    tokens: tuple[int, ...]
    parent: "Block | None"
    start: int
    last_use: int
    is_full: bool = True
    children: dict[int, list["Block"]] = field(default_factory=dict)  # by their first token
    num_children: int = 0
    is_here: bool = True
    is_coming: bool = False
    ends: bool = False

    @property
    def end(self) -> int:
        """One past the position of its last token."""
        return self.start + len(self.tokens)

    def up_to(self, known: Container["Block"] = ()) -> list["Block"]:
        """Return the block and its ancestors, last first, up to the first that is ``known``, which is left out."""
        found = list[Block]()
        at: Block | None = self
        while at is not None and at not in known:
            found.append(at)
            at = at.parent
        return found

    @property
    def path(self) -> list["Block"]:
        """Its ancestors and itself, in the order of their tokens."""
        return self.up_to()[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks, in order, whose tokens begin with the first ``num_tokens`` tokens of a sequence. The last block may have
    more."""

    blocks: tuple[Block, ...] = ()
    num_tokens: int = 0

    @property
    def is_everything(self) -> bool:
        """Whether it contains all that an earlier request has left."""
        return bool(self.blocks) and self.blocks[-1].ends and self.blocks[-1].end == self.num_tokens


class BlockTree:
    """A tree of blocks, found by their tokens.

    root: the key from which all keys are chained; it stands for the model and the KV format.
    whole_blocks: whether only a sequence that has all tokens of a block can use it, as with recurrent states.
    block: tokens of a full block.
    """

    def __init__(self, root: Key = b"", *, whole_blocks: bool = False, block: int = BLOCK) -> None:
        self.root = root
        self._whole_blocks, self._block = whole_blocks, block
        self._first: dict[int, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._by_key: dict[Key, Block] = {}
        self._leaves: list[tuple[int, int]] = []  # (last use, id) of blocks without children, in order
        self._next_id, self._clock = 1, 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def find(self, tokens: Sequence[int]) -> Match:
        """Return the longest prefix of ``tokens`` that has KV. It leaves at least one token to compute, whose logits
        are needed."""
        wanted, at, found = len(tokens) - 1, 0, list[Block]()
        children = self._first
        while at < wanted:
            best, common = self._best(children.get(tokens[at], ()), tokens, at, wanted)
            if best is None:
                break
            found.append(best)
            at += common
            if common < self._block:
                break
            children = best.children
        return Match(tuple(found), at)

    def _best(self, among: Iterable[Block], tokens: Sequence[int], at: int, wanted: int) -> tuple[Block | None, int]:
        best, most = None, 0
        for block in among:
            common = _common(block.tokens, tokens, at, wanted)
            if common > most and not block.is_coming and not (self._whole_blocks and common < len(block.tokens)):
                best, most = block, common
        return best, most

    def new_id(self) -> int:
        """Return a block id that was not used before."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, parent: Block | None, tokens: Sequence[int]) -> tuple[Block, list[Block]]:
        """Add a block after ``parent``. Return it and the partial blocks that it replaces, whose tokens it begins with.
        The tree must not have this block yet (``child``)."""
        assert parent is None or parent.is_full
        key = chained(self.root if parent is None else parent.key, tokens)
        start = 0 if parent is None else parent.end
        block = Block(self.new_id(), key, tuple(tokens), parent, start, self._tick(), len(tokens) == self._block)
        siblings = self._siblings(block)
        replaced = [one for one in siblings if one.tokens == block.tokens[: len(one.tokens)]]
        siblings.append(block)
        self._blocks[block.block_id] = self._by_key[key] = block
        self._leaves.append((block.last_use, block.block_id))
        if parent is not None:
            parent.num_children += 1
            self._unlist_leaf(parent)
        for one in replaced:
            self.remove(one)
        return block, replaced

    def plant(self, kept: Iterable[DiskBlock]) -> list[Key]:
        """Add all blocks of ``kept`` that the root leads to, parents first. Return the keys of the partial blocks that
        longer ones replaced."""
        after: dict[Key, list[DiskBlock]] = defaultdict(list)
        for one in sorted(kept, key=lambda one: len(one.tokens)):
            after[one.parent].append(one)
        reached: list[Block | None] = [None]
        all_replaced: list[Block] = []
        while reached:
            parent = reached.pop()
            for one in after.pop(self.root if parent is None else parent.key, ()):
                if self.child(parent, one.tokens) is None:
                    block, replaced = self.add(parent, one.tokens)
                    all_replaced += replaced
                    if block.is_full:
                        reached.append(block)
        return [block.key for block in all_replaced]

    def get(self, key: Key) -> Block | None:
        """Return the block with this key. Return None if there is none."""
        return self._by_key.get(key)

    def child(self, parent: Block | None, tokens: Sequence[int]) -> Block | None:
        """Return the block after ``parent`` that begins with these tokens. Return None if there is none."""
        wanted, children = tuple(tokens), self._first if parent is None else parent.children
        same = (block for block in children.get(wanted[0], ()) if block.tokens[: len(wanted)] == wanted)
        return next((block for block in same if not self._whole_blocks or len(block.tokens) == len(wanted)), None)

    def use(self, block: Block) -> None:
        """Mark a block as just used, and so all blocks before it."""
        is_leaf = self._unlist_leaf(block)
        block.last_use = self._tick()
        if is_leaf:
            self._leaves.append((block.last_use, block.block_id))

    def remove(self, block: Block) -> None:
        """Remove a block that has no children."""
        assert not block.num_children, "a block is removed before those after it"
        del self._blocks[block.block_id], self._by_key[block.key]
        self._unlist_leaf(block)
        siblings, parent = self._siblings(block), block.parent
        siblings.remove(block)
        if not siblings:
            del (self._first if parent is None else parent.children)[block.tokens[0]]
        block.is_here = False
        if parent is not None:
            parent.num_children -= 1
            parent.last_use = max(parent.last_use, block.last_use)
            if not parent.num_children:
                insort(self._leaves, (parent.last_use, parent.block_id))

    def remove_all(self, block: Block) -> list[Block]:
        """Remove a block and all that follow it. Return them in the order of removal."""
        removed = [block]
        for one in removed:
            removed += (child for some in one.children.values() for child in some)
        removed.reverse()
        for one in removed:
            self.remove(one)
        return removed

    def evictable(self) -> Iterator[Block]:
        """Yield all blocks in eviction order: each after its children. Changes nothing."""
        parents: list[tuple[int, int]] = []  # blocks whose children have all been yielded
        num_gone: dict[int, int] = {}
        at = 0
        while at < len(self._leaves) or parents:
            if parents and (at == len(self._leaves) or parents[0] < self._leaves[at]):
                last_use, block_id = heapq.heappop(parents)
            else:
                last_use, block_id = self._leaves[at]
                at += 1
            block = self._blocks[block_id]
            yield block
            parent = block.parent
            if parent is None:
                continue
            num_gone[parent.block_id] = num_gone.get(parent.block_id, 0) + 1
            if num_gone[parent.block_id] == parent.num_children:
                heapq.heappush(parents, (max(parent.last_use, last_use), parent.block_id))

    def only_for(self, block: Block) -> Iterator[Block]:
        """Yield a leaf and its ancestors that lead to no other leaf, in eviction order."""
        alone: Block | None = block
        while alone is not None and alone.num_children <= (0 if alone is block else 1):
            yield alone
            alone = alone.parent

    def clear(self) -> None:
        """Remove all blocks."""
        for block in self:
            block.is_here = False
        self._first.clear()
        self._blocks.clear()
        self._by_key.clear()
        self._leaves.clear()

    def _siblings(self, block: Block) -> list[Block]:
        children = self._first if block.parent is None else block.parent.children
        return children.setdefault(block.tokens[0], [])

    def _unlist_leaf(self, block: Block) -> bool:
        """Remove a block from the list of leaves. Return whether it was in the list."""
        at = bisect_left(self._leaves, (block.last_use, block.block_id))
        if at == len(self._leaves) or self._leaves[at][1] != block.block_id:
            return False
        del self._leaves[at]
        return True

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _common(block: tuple[int, ...], tokens: Sequence[int], at: int, end: int) -> int:
    """Return the number of leading tokens that a block shares with ``tokens[at:end]``."""
    n = min(len(block), end - at)
    if block[:n] == tuple(tokens[at : at + n]):
        return n
    return next(i for i in range(n) if block[i] != tokens[at + i])
