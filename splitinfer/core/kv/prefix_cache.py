"""The prefix cache: blocks of KV, in memory and on disk, that sequences with the same tokens can begin with.

It holds two trees of token blocks (``core.kv.block_tree``): blocks that every stage has in memory, and blocks that
every stage has on disk. The plan after the one that completes a block *saves* it. Sequences can begin with it from the
next plan on, and with its file once all stages have reported it written. If the disk has more of a sequence's prefix
than memory, the rest is *fetched*: the blocks take their place in memory at once, marked as coming. Each plan reads a
few of them, and the sequence waits for the results. A block that any stage could not read is dropped on all stages,
with all blocks after it, so the stages never have to agree on anything.

If links pack the hidden states of prompts (``core.codecs``), a token's KV depends on whether it was generated or in
the prompt. Then only blocks of prompts are stored, and they match only prompts.

When a sequence is preempted, its blocks that are not on disk yet are written there without a place in memory
(``swap_out``). Later it is admitted like any other.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from splitinfer.core.kv.block_tree import Block, BlockTree, DiskBlock, Key, Match, chained
from splitinfer.core.kv.budget import STORED_BLOCK, KVBudget, KVUse
from splitinfer.core.plan import Fetch, Save, StageFigures, StepPlan
from splitinfer.core.sequence import Sequence

WORTH = 32  # tokens that a fetch must save; fewer are computed as fast as they are read
FETCHES = 2  # blocks read in one plan; reading one is much faster than computing a chunk
_SMOOTHING = 0.3  # weight of the newest fetch in the mean reading time


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """The rules for caching blocks.

    keeps_blocks: whether any blocks are cached.
    whole_blocks: whether blocks can only be used whole (``core.kv.block_tree``).
    prompts_only: whether only blocks of prompts are cached, because the KV of generated tokens differs.
    root: the key from which all keys are chained (``core.kv.block_tree``).
    on_disk: whether blocks are also written to disk.
    kept: the blocks that every stage has on disk at the start.
    max_sessions: the most session names that can be used to drop blocks.
    worth: tokens that a fetch from disk must save.
    """

    keeps_blocks: bool = True
    whole_blocks: bool = False
    prompts_only: bool = False
    root: Key = b""
    on_disk: bool = False
    kept: tuple[DiskBlock, ...] = ()
    max_sessions: int = 1024
    worth: int = WORTH


class PrefixCache:
    """Decides which blocks are saved, fetched and dropped. Pure. ``tree``: blocks that every stage has in memory or is
    reading; ``disk``: blocks that every stage has on disk; ``budget``: the memory of blocks and sequences."""

    def __init__(self, config: PrefixCacheConfig, budget: KVBudget) -> None:
        self._config, self.budget = config, budget
        self.tree = BlockTree(config.root, whole_blocks=config.whole_blocks, block=budget.block)
        self.files = BlockFiles(config.root, whole_blocks=config.whole_blocks, block=budget.block)
        self.disk = self.files.tree
        self.sessions = OpenConversations(config.max_sessions)
        self.num_fetched = 0  # tokens read from disk
        self.num_swapped = 0  # tokens written for preempted sequences
        self.seconds_per_token: float | None = None  # for reading, on the slowest stage
        self.awaiting: dict[int, Sequence] = {}  # sequences that wait for blocks from disk, by id
        self._saves: list[Save] = []
        self._dropped: list[int] = []
        self._fetches: deque[Fetch] = deque()
        self.files.begin_with(config.kept)

    @property
    def use(self) -> KVUse:
        """The memory of all blocks."""
        return KVUse(stored=len(self.tree))

    @property
    def has_changes(self) -> bool:
        """Whether the next plan has changes to carry."""
        return bool(self._saves or self._dropped or self._fetches or self.files.has_changes)

    def take_changes(self) -> tuple[tuple[Save, ...], tuple[int, ...], tuple[Fetch, ...], tuple[Key, ...]]:
        """Return and clear the saves, dropped blocks, fetches (at most ``FETCHES``) and erased files of the next
        plan."""
        saves, dropped = tuple(self._saves), tuple(self._dropped)
        fetches = tuple(self._fetches.popleft() for _ in range(min(FETCHES, len(self._fetches))))
        self._saves.clear()
        self._dropped.clear()
        return saves, dropped, fetches, self.files.take_erased()

    # -- matching and fetching -----------------------------------------------------------------

    def match(self, seq: Sequence) -> Match:
        """Return the longest match of a sequence with blocks in memory."""
        return self.tree.find(seq.tokens[: self._usable(seq)]) if self._config.keeps_blocks else Match()

    def first_lacking(self, seq: Sequence) -> Key | None:
        """Return the key of the first full block of a prompt that is not in memory, or None. Asked again, it takes no
        longer than the blocks that have come or gone since."""
        keys, at = seq.keys, seq.kv.num_held
        while at and not self._holds(keys[at - 1]):
            at -= 1
        while at < len(keys) and self._holds(keys[at]):
            at += 1
        seq.kv.num_held = at
        return keys[at] if at < len(keys) else None

    def _holds(self, key: Key) -> bool:
        block = self.tree.get(key)
        return block is not None and not block.is_coming

    def _usable(self, seq: Sequence) -> int:
        """Return how many of a sequence's tokens may take their KV from stored blocks. Rows that are scored must be
        computed."""
        return min(self._reach(seq), len(seq.scores)) if seq.num_to_score else self._reach(seq)

    def _reach(self, seq: Sequence) -> int:
        """Return how many of a sequence's tokens may have their KV stored."""
        return seq.num_prompt_tokens if self._config.prompts_only else len(seq.tokens)

    def ahead(self, seq: Sequence, match: Match) -> tuple[Block, ...]:
        """Return the blocks on disk that continue ``match``, which is in memory. Empty if the sequence has fetched
        before."""
        if not len(self.disk) or seq.kv.has_fetched:
            return ()
        found = self.disk.find(seq.tokens[: self._usable(seq)])
        if found.num_tokens < match.num_tokens + self._config.worth:
            return ()
        in_memory = self._in_memory(one.tokens for one in found.blocks)
        first = next((i for i, block in enumerate(in_memory) if block.is_coming), len(in_memory))
        return found.blocks[first:]

    def _in_memory(self, runs: Iterable[Seq[int]]) -> list[Block]:
        """Return the memory's blocks with these runs of tokens, also those being read, up to the first that is
        missing."""
        in_memory: list[Block] = []
        for tokens in runs:
            block = self.tree.child(in_memory[-1] if in_memory else None, tokens)
            if block is None:
                break
            in_memory.append(block)
        return in_memory

    def fetch(self, seq: Sequence, ahead: Seq[Block]) -> None:
        """Make a sequence wait for the blocks ``ahead`` on disk. Read them unless another sequence's fetch does."""
        seq.kv.has_fetched = True
        path = ahead[-1].path
        in_memory = self._in_memory(one.tokens for one in path)
        seq.kv.awaits = [block for block in in_memory if block.is_coming]
        for one in path[len(in_memory) :]:
            block = self._add(in_memory[-1] if in_memory else None, one.tokens)
            block.is_coming = True
            in_memory.append(block)
            seq.kv.awaits.append(block)
            self._fetches.append(Fetch(block.block_id, block.key, block.start, block.end))
        if seq.kv.awaits:
            self.awaiting[seq.seq_id] = seq

    def num_lacking(self, ahead: Seq[Block]) -> int:
        """Return how many more blocks of memory the blocks up to and including ``ahead`` need."""
        path = ahead[-1].path if ahead else ()
        return len(path) - len(self._in_memory(one.tokens for one in path))

    @property
    def pinned(self) -> set[Block]:
        """Blocks being read, and those before them. Each is read or dropped once a plan under way is done."""
        found = set[Block]()
        for seq in self.awaiting.values():
            for block in reversed(seq.kv.awaits):
                found.update(block.up_to(found))
        return found

    def coming(self) -> Iterable[Key]:
        """Return the keys of blocks being read."""
        return (block.key for seq in self.awaiting.values() for block in seq.kv.awaits)

    # -- storing -------------------------------------------------------------------------------

    def begin(self, seq: Sequence, match: Match) -> None:
        """Start a sequence with the blocks that match it."""
        here = [block for block in match.blocks if block.is_here]  # the sequence takes over the others
        seq.comes_back |= match.is_everything
        seq.kv.num_reused, seq.kv.is_stored = match.num_tokens, len(here) == len(match.blocks)
        seq.kv.blocks = here[: match.num_tokens // self.budget.block]
        if here:
            self.tree.use(here[-1])

    def store_full_blocks(self, seq: Sequence, used: KVUse) -> None:
        """Store the blocks that a sequence's planned tokens complete. The next plan saves them before it does anything
        else. ``used``: the KV of all running sequences."""
        while (end := (len(seq.kv.blocks) + 1) * self.budget.block) <= min(seq.num_scheduled, self._reach(seq)):
            if not self._store(seq, end, used):
                return

    def store_rest(self, seq: Sequence, used: KVUse, *, again: bool = False) -> None:
        """Store the remaining blocks of a sequence that ends, also its last, partial one. A conversation continues from
        there, and so does a prompt that was cancelled and comes again. ``used``: the KV of the other running sequences.
        ``again``: also store blocks that found no room while the sequence ran; the caches must be able to copy any
        positions."""
        end, size = min(seq.num_scheduled, self._reach(seq)), self.budget.block
        if again and not seq.kv.is_stored and not self._config.whole_blocks:
            found = self._in_memory(seq.tokens[start : start + size] for start in range(0, end - size + 1, size))
            seq.kv.blocks = list(takewhile(lambda block: not block.is_coming, found))
            seq.kv.is_stored = True
        self.store_full_blocks(seq, used)  # a result may have many tokens
        is_past_end = self._config.whole_blocks and end < seq.num_sure  # a state stands for all tokens so far
        if end > len(seq.kv.blocks) * size and not is_past_end:
            self._store(seq, end, used)
        if seq.kv.blocks:
            self.sessions.ended(seq)

    def swap_out(self, seq: Sequence) -> None:
        """Write the blocks of a sequence that is being preempted to disk, unless they are there. The next plan saves
        them before it frees the sequence. The caches must be able to copy any positions."""
        if not (self._config.on_disk and self._config.keeps_blocks) or self._config.whole_blocks:
            return
        parent, end = self.tree.root, min(seq.num_scheduled, self._reach(seq))
        size = self.budget.block
        for start in range(0, end, size):
            tokens = tuple(seq.tokens[start : min(start + size, end)])
            key = chained(parent, tokens)
            if self.disk.get(key) is None and not self.files.expects(key):
                block_id = self.tree.new_id()
                self._saves.append(Save(block_id, seq.seq_id, start, start + len(tokens), parent, tokens))
                self._dropped.append(block_id)
                self.files.expect(DiskBlock(parent, tokens), key)
                self.num_swapped += len(tokens)
            parent = key

    def _store(self, seq: Sequence, end: int, used: KVUse) -> bool:
        """Store a sequence's tokens from its last stored block to ``end``. Return whether there was room."""
        parent, start = seq.kv.blocks[-1] if seq.kv.blocks else None, len(seq.kv.blocks) * self.budget.block
        seq.kv.is_stored &= self._config.keeps_blocks and (parent is None or parent.is_here)
        if not seq.kv.is_stored:
            return False
        if parent is not None:
            self.tree.use(parent)
        tokens = tuple(seq.tokens[start:end])
        block = self.tree.child(parent, tokens)
        if block is None:
            if self.make_room(used + self.use + STORED_BLOCK, seq.kv.blocks) is None:
                seq.kv.is_stored = False
                return False
            block = self._add(parent, tokens)
            self._saves.append(self._save(block, seq))
        seq.kv.blocks.append(block)
        return True

    def _add(self, parent: Block | None, tokens: tuple[int, ...]) -> Block:
        block, replaced = self.tree.add(parent, tokens)
        self._drop(replaced)
        return block

    def _drop(self, blocks: Iterable[Block]) -> None:
        """Make the stages drop blocks that were removed from the tree, and cancel their fetches."""
        removed = {block.block_id for block in blocks}
        unread = {fetch.block_id for fetch in self._fetches} & removed
        if unread:
            self._fetches = deque(fetch for fetch in self._fetches if fetch.block_id not in unread)
        if removed:
            self._update_awaiting()  # a sequence may wait for a block that a longer one has replaced
        self._dropped += sorted(removed - unread)

    def _save(self, block: Block, seq: Sequence) -> Save:
        if not self._config.on_disk or self.disk.get(block.key) is not None:
            return Save(block.block_id, seq.seq_id, block.start, block.end)
        parent = self.tree.root if block.parent is None else block.parent.key
        self.files.expect(DiskBlock(parent, block.tokens), block.key)
        return Save(block.block_id, seq.seq_id, block.start, block.end, parent, block.tokens)

    def make_room(
        self, use: KVUse, keep: Collection[Block] = (), victims: Iterable[Sequence] = ()
    ) -> list[Sequence] | None:
        """Evict blocks, the least recently used first, until ``use``, which includes all blocks, fits. Blocks in
        ``keep`` stay. A thousandth of all blocks goes at once, because finding the order takes time for each of them.
        Return the fewest ``victims``, in their order, that must also give up their KV. Return None, and evict nothing,
        if ``use`` would not fit even without all of them."""
        evicted, preempted = list[Block](), list[Sequence]()
        if not self.budget.fits(use):
            pinned, together = self.pinned, len(self.tree) >> 10
            for block in self.sessions.evictable(self.tree):
                if block not in keep and block not in pinned:
                    evicted.append(block)
                    use -= STORED_BLOCK
                    if len(evicted) >= together and self.budget.fits(use):
                        break
        for one in victims:
            if self.budget.fits(use):
                break
            preempted.append(one)
            use -= self.budget.use_of(one.kv_tokens)
        if not self.budget.fits(use):
            return None
        for block in evicted:
            self.evict(block)
        return preempted

    # -- evicting ------------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        """Drop a leaf from memory."""
        self.tree.remove(block)
        self._drop([block])

    def forget(self, session: str) -> None:
        """Forget a session and drop its blocks, except blocks that other sequences' blocks follow."""
        block, pinned = self.sessions.close(session), self.pinned
        if block is not None:
            for one in list(self.tree.only_for(block)):
                if one in pinned:
                    return
                self.evict(one)

    def leave(self, seq: Sequence) -> None:
        """Stop making a sequence wait for blocks."""
        self.awaiting.pop(seq.seq_id, None)
        seq.kv.awaits = []

    def clear(self, kept: Iterable[DiskBlock]) -> None:
        """Start again after the stages have lost everything except the blocks ``kept`` on disk."""
        for pending in (self._saves, self._dropped, self._fetches, self.sessions):
            pending.clear()
        for seq in list(self.awaiting.values()):
            self.leave(seq)
        self.tree.clear()
        self.files.begin_with(kept)

    # -- taking in results ---------------------------------------------------------------------

    def learn(self, plan: StepPlan, figures: Seq[StageFigures]) -> None:
        """Note from a step's figures which of the plan's fetches were read and which files were written."""
        if plan.fetches:
            lacking = {block_id for each in figures for block_id in each.lacking}
            for fetch in plan.fetches:
                block = self.tree.get(fetch.key)
                if block is not None and block.block_id == fetch.block_id:
                    self._arrive(block, was_read=fetch.block_id not in lacking)
            self._update_awaiting()
            self._measure_reading(plan, figures)
        self.files.learn(figures)

    def _measure_reading(self, plan: StepPlan, figures: Seq[StageFigures]) -> None:
        """Update the seconds for reading a token on the slowest stage."""
        sizes = {fetch.block_id: fetch.end - fetch.start for fetch in plan.fetches}
        each = [
            one.fetching / read
            for one in figures
            if (read := sum(size for block_id, size in sizes.items() if block_id not in one.lacking))
        ]
        if each and max(each) > 0:
            now, before = max(each), self.seconds_per_token
            self.seconds_per_token = now if before is None else before + _SMOOTHING * (now - before)

    def _arrive(self, block: Block, *, was_read: bool) -> None:
        if was_read:
            block.is_coming = False
            self.num_fetched += len(block.tokens)
            self.tree.use(block)
            return
        on_disk = self.disk.get(block.key)
        if on_disk is not None:
            self.disk.remove_all(on_disk)
        self._drop(self.tree.remove_all(block))

    def _update_awaiting(self) -> None:
        """Release the sequences whose blocks were all read or dropped."""
        for seq in list(self.awaiting.values()):
            seq.kv.awaits = [block for block in seq.kv.awaits if block.is_here and block.is_coming]
            if not seq.kv.awaits:
                self.leave(seq)


_SHARE = 0.75  # of all blocks, at most, are protected for open conversations


class OpenConversations:
    """The last block of each open conversation, by session name or by the block's key. Holds the ``most`` conversations
    that went on last. Their blocks are evicted last, so they get the memory when it is short.

    A conversation is open if it has a session name, or once it *came back*: a request began with all that an earlier
    one had left. Other prompts may never be asked again. A share of all blocks is not protected, so that new
    conversations can begin. Of the protected blocks, the latest conversation's and the first ones of each stay longest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[str | Key, Block] = OrderedDict()

    def __iter__(self) -> Iterator[str | Key]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def ended(self, seq: Sequence) -> None:
        """Note that a request with stored blocks has ended."""
        last = seq.kv.blocks[-1]
        last.ends = True
        if seq.session is None and not seq.comes_back:
            return
        name = last.key if seq.session is None else seq.session
        self._last[name] = last
        self._last.move_to_end(name)
        for gone in [one for one, block in self._last.items() if not block.is_here]:
            del self._last[gone]  # it protects nothing and would keep the blocks before it alive
        while len(self) > self._most:
            nameless = (one for one in self._last if not isinstance(one, str))
            del self._last[next(nameless, next(iter(self._last)))]  # a name is a promise that it can be dropped

    def close(self, session: str) -> Block | None:
        """Forget a session. Return its last block, or None if that was removed."""
        last = self._last.pop(session, None)
        return last if last is not None and last.is_here else None

    def clear(self) -> None:
        """Forget all conversations."""
        self._last.clear()

    def evictable(self, tree: BlockTree) -> Iterator[Block]:
        """Yield the blocks of a tree in eviction order, the ones of open conversations last. Changes nothing."""
        are_last = self._blocks(int(_SHARE * len(tree)))
        yield from (block for block in tree.evictable() if block not in are_last)
        yield from (block for block in tree.evictable() if block in are_last)

    def _blocks(self, most: int) -> set[Block]:
        """Return up to ``most`` protected blocks, each with all blocks before it, which cannot be evicted earlier."""
        found = set[Block]()
        for last in reversed(self._last.values()):
            path = last.up_to(found)[::-1] if last.is_here else []
            found.update(path[: most - len(found)])
            if len(found) >= most:
                break
        return found


_MOST_ASKED = 60  # times that ``ask`` sends a plan after the last expected block
_MOST_UNWRITTEN = 4096  # expected files; a stage whose disk is full never reports its own


class BlockFiles:
    """The blocks that every stage has on disk (``tree``), and the files that are still expected.

    A block counts as on disk once all stages have reported it written. They report with the results of steps. While no
    step is under way, ``ask`` sends an empty plan for the reports.
    """

    def __init__(self, root: Key, *, whole_blocks: bool, block: int) -> None:
        self.tree = BlockTree(root, whole_blocks=whole_blocks, block=block)
        self._unwritten: OrderedDict[Key, tuple[DiskBlock, set[int]]] = OrderedDict()  # with the stages that wrote them
        self._erased: list[Key] = []
        self.is_asking, self._asks_left = False, 0  # whether to send the next plan even if it is empty

    def begin_with(self, kept: Iterable[DiskBlock]) -> None:
        """Start again with the blocks that every stage has on disk."""
        self._unwritten.clear()
        self.tree.clear()
        self.is_asking, self._erased = False, self.tree.plant(kept)

    @property
    def has_changes(self) -> bool:
        """Whether the next plan must erase files or ask for reports."""
        return bool(self._erased or self.is_asking)

    def take_erased(self) -> tuple[Key, ...]:
        """Return and clear the keys of the files that will not be read again, for the next plan."""
        erased, self._erased, self.is_asking = tuple(self._erased), [], False
        return erased

    def expects(self, key: Key) -> bool:
        """Return whether a block is being written."""
        return key in self._unwritten

    def expect(self, kept: DiskBlock, key: Key) -> None:
        """Note that the stages will write a block."""
        self._unwritten[key], self._asks_left = (kept, set()), _MOST_ASKED
        if len(self._unwritten) > _MOST_UNWRITTEN:
            self._unwritten.popitem(last=False)

    def ask(self) -> bool:
        """Send a plan even if it is empty, because its result reports the files written since the last one. Return
        whether a report is still expected. Call it from time to time while nothing is under way."""
        if self._unwritten and self._asks_left:
            self.is_asking, self._asks_left = True, self._asks_left - 1
        return self.is_asking

    def learn(self, figures: Seq[StageFigures]) -> None:
        """Note from a step's figures which files were written, if any file is expected."""
        for each in figures if self._unwritten else ():
            for key in each.written:
                self._written(key, each.stage, num_stages=len(figures))

    def _written(self, key: Key, stage: int, num_stages: int) -> None:
        if key not in self._unwritten:
            return
        kept, written_by = self._unwritten[key]
        written_by.add(stage)
        if len(written_by) >= num_stages:
            del self._unwritten[key]
            self._add(kept)

    def _add(self, kept: DiskBlock) -> None:
        parent = None if kept.parent == self.tree.root else self.tree.get(kept.parent)
        is_orphan = parent is None and kept.parent != self.tree.root
        if is_orphan or self.tree.get(chained(kept.parent, kept.tokens)) is not None:
            return
        _, replaced = self.tree.add(parent, kept.tokens)
        self._erased += [one.key for one in replaced]
