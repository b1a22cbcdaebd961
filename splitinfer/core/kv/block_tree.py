"""Which blocks of tokens have KV on every stage: a tree of prefixes, kept by the coordinator alone.

    root ─┬─ [0, 256) "You are …" ─┬─ [256, 512) ─── [512, 600)     a conversation; its last block is partial
          │                        └─ [256, 512)'                   another one with the same system prompt
          └─ [0, 40)

A node is one block: up to ``BLOCK`` tokens after those of its parent; only a full one has children. Stages keep a
block's KV under its id and obey. Nobody but this index decides what is there, so stages never have to agree: every
pipeline that let each rank match on its own shipped a dead lock or wrong tokens. Keys are chained hashes (after
vLLM's automatic prefix caching): a key stands for the block's tokens and all before them.

Blocks go leaves first, the least recently used first, since a block is of no use without those before it. The one
who asks what may go changes nothing by asking, so a step can be planned before it is carried out.
"""

import hashlib
import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from splitinfer.core.kv.budget import BLOCK

Key = bytes  # of a block and all before it
KEY_BYTES = 16


def chained(parent: Key, tokens: Iterable[int]) -> Key:
    """The key of a block after the one with key ``parent``."""
    said = ",".join(map(str, tokens)).encode()
    return hashlib.blake2b(parent + said, digest_size=KEY_BYTES).digest()


def full_keys(root: Key, tokens: Sequence[int]) -> tuple[Key, ...]:
    """The keys of the full blocks that a sequence of tokens begins with.

    >>> [len(full_keys(b"", range(n))) for n in (255, 256, 700)]
    [0, 1, 2]
    """
    keys, key = [], root
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = chained(key, tokens[start : start + BLOCK])
        keys.append(key)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block on disk: ``tokens`` after the block of key ``parent``."""

    parent: Key
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    """A node: ``tokens`` after the ``start`` tokens of its ancestors. Equal only to itself.

    ``is_here``: it has not been removed. ``is_coming``: it is being read from disk; nobody can begin with it yet.
    """

    block_id: int
    key: Key
    tokens: tuple[int, ...]
    parent: "Block | None"
    start: int
    last_use: int
    children: dict[int, list["Block"]] = field(default_factory=dict)  # by their first token
    num_children: int = 0
    is_here: bool = True
    is_coming: bool = False

    @property
    def end(self) -> int:
        """Tokens up to and with it."""
        return self.start + len(self.tokens)

    @property
    def is_full(self) -> bool:
        """Whether others may follow it."""
        return len(self.tokens) == BLOCK

    @property
    def path(self) -> tuple["Block", ...]:
        """Its ancestors and itself, from the first tokens on."""
        return (*(() if self.parent is None else self.parent.path), self)


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks, in order, that hold the first ``num_tokens`` tokens of a sequence; the last perhaps more than those."""

    blocks: tuple[Block, ...] = ()
    num_tokens: int = 0

    def without(self, going: Collection[Block]) -> "Match":
        """What is left of it when these go."""
        first = next((block for block in self.blocks if block in going), None)
        return self if first is None else Match(first.path[:-1], first.start)


class BlockTree:
    """``root``: what keys begin with (model, format). ``whole_blocks``: the stages keep states that stand for all of
    a block's tokens or none, so a block is of use only to a sequence that has them all."""

    def __init__(self, root: Key = b"", *, whole_blocks: bool = False) -> None:
        self.root = root
        self._whole_blocks = whole_blocks
        self._first: dict[int, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._by_key: dict[Key, Block] = {}
        self._leaves: list[tuple[int, int]] = []  # (last use, id) of those without children, in order
        self._next_id, self._clock = 1, 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest prefix that has KV, leaving at least one token to compute: its logits are wanted."""
        wanted, at, found = len(tokens) - 1, 0, list[Block]()
        children = self._first
        while at < wanted:
            best, common = self._best(children.get(tokens[at], ()), tokens, at, wanted)
            if best is None:
                break
            found.append(best)
            at += common
            if common < BLOCK:
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
        """A number that no block has had."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, parent: Block | None, tokens: Sequence[int]) -> tuple[Block, list[Block]]:
        """A new block after ``parent``, and the partial ones whose place it takes: it has their tokens and more.

        The caller has looked that there is no such block (``child``).
        """
        assert parent is None or parent.is_full
        key = chained(self.root if parent is None else parent.key, tokens)
        start = 0 if parent is None else parent.end
        block = Block(self.new_id(), key, tuple(tokens), parent, start, self._tick())
        siblings = self._siblings(block)
        outdone = [one for one in siblings if one.tokens == block.tokens[: len(one.tokens)]]
        siblings.append(block)
        self._blocks[block.block_id] = self._by_key[key] = block
        self._leaves.append((block.last_use, block.block_id))
        if parent is not None:
            parent.num_children += 1
            self._is_no_leaf(parent)
        for one in outdone:
            self.remove(one)
        return block, outdone

    def plant(self, kept: Iterable[DiskBlock]) -> list[Key]:
        """Add all that can be reached from the root, those first that come before others; the keys of blocks that
        longer ones have outdone."""
        after: dict[Key, list[DiskBlock]] = defaultdict(list)
        for one in sorted(kept, key=lambda one: len(one.tokens)):
            after[one.parent].append(one)
        reached: list[Block | None] = [None]
        all_outdone: list[Block] = []
        while reached:
            parent = reached.pop()
            for one in after.pop(self.root if parent is None else parent.key, ()):
                if self.child(parent, one.tokens) is None:
                    block, outdone = self.add(parent, one.tokens)
                    all_outdone += outdone
                    if block.is_full:
                        reached.append(block)
        return [block.key for block in all_outdone]

    def get(self, key: Key) -> Block | None:
        """The block of that key."""
        return self._by_key.get(key)

    def child(self, parent: Block | None, tokens: Sequence[int]) -> Block | None:
        """The block after ``parent`` that has these tokens, perhaps among more."""
        wanted, children = tuple(tokens), self._first if parent is None else parent.children
        same = (block for block in children.get(wanted[0], ()) if block.tokens[: len(wanted)] == wanted)
        return next((block for block in same if not self._whole_blocks or len(block.tokens) == len(wanted)), None)

    def use(self, blocks: Iterable[Block]) -> None:
        """These were of use just now. Ancestors come before their descendants, and so count as used earlier."""
        for block in blocks:
            is_leaf = self._is_no_leaf(block)
            block.last_use = self._tick()
            if is_leaf:
                self._leaves.append((block.last_use, block.block_id))

    def remove(self, block: Block) -> None:
        """Forget a block that has no children."""
        assert not block.num_children, "a block goes before those after it"
        del self._blocks[block.block_id], self._by_key[block.key]
        self._is_no_leaf(block)
        siblings, parent = self._siblings(block), block.parent
        siblings.remove(block)
        if not siblings:
            del (self._first if parent is None else parent.children)[block.tokens[0]]
        block.is_here = False
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children:
                insort(self._leaves, (parent.last_use, parent.block_id))

    def remove_all(self, block: Block) -> list[Block]:
        """Forget a block and all after it; these, in the order in which they went."""
        going = [block]
        for one in going:
            going += (child for some in one.children.values() for child in some)
        going.reverse()
        for one in going:
            self.remove(one)
        return going

    def evictable(self) -> Iterator[Block]:
        """Blocks in the order in which they may go, as if each had gone before the next; nothing is changed."""
        parents: list[tuple[int, int]] = []  # those that have lost their children by now
        gone: dict[int, int] = {}
        at = 0
        while at < len(self._leaves) or parents:
            if parents and (at == len(self._leaves) or parents[0] < self._leaves[at]):
                block = self._blocks[heapq.heappop(parents)[1]]
            else:
                block = self._blocks[self._leaves[at][1]]
                at += 1
            yield block
            parent = block.parent
            if parent is None:
                continue
            gone[parent.block_id] = gone.get(parent.block_id, 0) + 1
            if gone[parent.block_id] == parent.num_children:
                heapq.heappush(parents, (parent.last_use, parent.block_id))

    def only_for(self, block: Block) -> Iterator[Block]:
        """A leaf and those before it that nobody else needs, in the order in which they may go."""
        alone: Block | None = block
        while alone is not None and alone.num_children <= (0 if alone is block else 1):
            yield alone
            alone = alone.parent

    def clear(self) -> None:
        """Forget all."""
        for block in self:
            block.is_here = False
        self._first.clear()
        self._blocks.clear()
        self._by_key.clear()
        self._leaves.clear()

    def check(self) -> None:
        """Assert what must always hold; tests call it."""
        for block in self:
            assert block.is_here
            assert 0 < len(block.tokens) <= BLOCK
            assert block in self._siblings(block)
            assert block.is_full or not block.children
            assert block.num_children == sum(map(len, block.children.values()))
            if block.parent is not None:
                assert block.parent.is_full
                assert block.parent.end == block.start
                assert self._blocks[block.parent.block_id] is block.parent
        assert {block.key: block for block in self} == self._by_key
        below = [block for block in self if block.parent is None]
        assert sum(map(len, self._first.values())) == len(below)
        assert self._leaves == sorted((one.last_use, one.block_id) for one in self if not one.children)

    def _siblings(self, block: Block) -> list[Block]:
        children = self._first if block.parent is None else block.parent.children
        return children.setdefault(block.tokens[0], [])

    def _is_no_leaf(self, block: Block) -> bool:
        """Strike a block off the leaves; whether it was one."""
        at = bisect_left(self._leaves, (block.last_use, block.block_id))
        if at == len(self._leaves) or self._leaves[at][1] != block.block_id:
            return False
        del self._leaves[at]
        return True

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _common(block: tuple[int, ...], tokens: Sequence[int], at: int, end: int) -> int:
    """How many tokens of a block are those of a sequence from ``at`` on, before ``end``."""
    n = min(len(block), end - at)
    if block[:n] == tuple(tokens[at : at + n]):
        return n
    return next(i for i in range(n) if block[i] != tokens[at + i])
