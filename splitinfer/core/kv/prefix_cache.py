"""What was computed is kept, block by block, for whoever begins with the same tokens: in memory, and on disk.

Two trees of the same tokens (``core.kv.block_tree``): the blocks that are in every stage's memory, and those of which
every stage has a file. A block is *saved* by the plan after the one that completes it; it is of use from the next plan
on, and its file is too once all stages have said that they wrote it. A sequence that could begin with more than memory
holds has the rest *fetched*: the blocks take their place in memory at once, as coming; a few at a time travel with the
plans, as long as no step gets much longer by it; and the sequence waits until the results are back. What a single stage
could not read is dropped on all of them, with everything after it, and computed again.

So the stages never have to agree on anything, and what is only on some of them does not count.

Where links pack the hidden states of prompts (``core.wire_codec``), KV of generated tokens is not that of the same
tokens in a prompt. Then only prompts are kept, and only a prompt begins with what is kept.

A sequence that gives up its KV has what is not on disk yet written there, without a place in memory (``swap_out``), and
begins again like any other: with what it finds. Whether reading is faster than computing again is measured: by what
fetches have taken so far, and by what steps cost (``core.scheduler.cost_model``).
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from splitinfer.core.kv.block_tree import Block, BlockTree, DiskBlock, Key, Match, chained
from splitinfer.core.kv.budget import BLOCK, STORED_BLOCK, KVBudget, KVUse
from splitinfer.core.plan import Fetch, Save, StageFigures, StepPlan
from splitinfer.core.sequence import Sequence

WORTH = 32  # tokens that a fetch must spare; fewer are computed as soon as they are read
FETCHES = 2  # blocks in one plan: reading one takes a small part of what computing a chunk takes
_SMOOTHING = 0.3  # weight of the newest fetch, in what reading takes
_MOST_UNWRITTEN = 4096  # blocks whose files are waited for; a stage whose disk is full never tells of them


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """``keeps_blocks``: keep what was computed for others; ``whole_blocks``: it can only be used up to the end of a
    block (``core.kv.block_tree``); ``prompts_only``: what is generated is another matter than a prompt of the same
    tokens; ``root``: what its keys begin with; ``on_disk``: whether it is written to disk, too; ``kept``: what is on
    every stage's disk; ``max_sessions``: names under which it can be forgotten."""

    keeps_blocks: bool = True
    whole_blocks: bool = False
    prompts_only: bool = False
    root: Key = b""
    on_disk: bool = False
    kept: tuple[DiskBlock, ...] = ()
    max_sessions: int = 1024

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, not {self.max_sessions}")


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What the stages are to do with blocks in the next plan."""

    saves: tuple[Save, ...]
    dropped: tuple[int, ...]
    fetches: tuple[Fetch, ...]
    erased: tuple[Key, ...]


@dataclass(slots=True)
class _Unwritten:
    """A block whose file some stages have still to write."""

    kept: DiskBlock
    written_by: set[int] = field(default_factory=set)  # stages


class PrefixCache:
    """Pure. ``index``: what is in memory, or coming; ``disk``: what is on every stage's disk."""

    def __init__(self, config: PrefixCacheConfig, budget: KVBudget) -> None:
        self._config, self._budget = config, budget
        self.tree = BlockTree(config.root, whole_blocks=config.whole_blocks)
        self.disk = BlockTree(config.root, whole_blocks=config.whole_blocks)
        self.sessions: OrderedDict[str, Block] = OrderedDict()  # the last block of each one's last request
        self.num_fetched = 0  # tokens that came from disk
        self.num_swapped = 0  # tokens written for sequences that gave up their KV
        self.seconds_per_token: float | None = None  # that reading takes, on the slowest stage
        self._awaiting: dict[int, Sequence] = {}
        self._saves: list[Save] = []
        self._dropped: list[int] = []
        self._fetches: deque[Fetch] = deque()
        self._erased: list[Key] = []
        self._unwritten: OrderedDict[Key, _Unwritten] = OrderedDict()
        self._erased += self.disk.plant(config.kept)

    @property
    def use(self) -> KVUse:
        """The memory that blocks take."""
        return KVUse(stored=len(self.tree))

    @property
    def has_changes(self) -> bool:
        """Whether the stages have something to do with blocks."""
        return bool(self._saves or self._dropped or self._fetches or self._erased)

    def take_changes(self) -> BlockChanges:
        """What the next plan says of blocks; it has been said then."""
        fetches = tuple(self._fetches.popleft() for _ in range(min(FETCHES, len(self._fetches))))
        changes = BlockChanges(tuple(self._saves), tuple(self._dropped), fetches, tuple(self._erased))
        for said in (self._saves, self._dropped, self._erased):
            said.clear()
        return changes

    # -- beginning with what is kept -----------------------------------------------------------

    def match(self, seq: Sequence) -> Match:
        """The blocks in memory that a sequence can begin with."""
        return self.tree.find(seq.tokens[: self._reach(seq)]) if self._config.keeps_blocks else Match()

    def _reach(self, seq: Sequence) -> int:
        """Tokens of a sequence whose KV is, or would be, of use to others."""
        return seq.num_prompt_tokens if self._config.prompts_only else len(seq.tokens)

    def ahead(self, seq: Sequence, match: Match, going: Collection[Block] = ()) -> tuple[Block, ...]:
        """What is on disk, and would take a sequence further than ``match``, which is in memory; none if it has asked
        before. ``going``: blocks that will not be in memory any more."""
        if not len(self.disk) or seq.has_fetched:
            return ()
        found = self.disk.find(seq.tokens[: self._reach(seq)])
        if found.num_tokens < match.num_tokens + WORTH:
            return ()
        here = self._here(found.blocks)
        first = next((i for i, block in enumerate(here) if block in going or block.is_coming), len(here))
        return found.blocks[first:]

    def _here(self, on_disk: Iterable[Block]) -> list[Block]:
        """The blocks in memory, or coming, that have the tokens of those on disk, up to the first that lacks."""
        here: list[Block] = []
        for one in on_disk:
            block = self.tree.child(here[-1] if here else None, one.tokens)
            if block is None:
                break
            here.append(block)
        return here

    def fetch(self, seq: Sequence, ahead: Seq[Block]) -> None:
        """Have a sequence wait for blocks of the disk, which are read unless they are on their way for another."""
        seq.has_fetched = True
        path = ahead[-1].path
        here = self._here(path)
        seq.awaits = [block for block in here if block.is_coming]
        for one in path[len(here) :]:
            block = self._add(here[-1] if here else None, one.tokens)
            block.is_coming = True
            here.append(block)
            seq.awaits.append(block)
            self._fetches.append(Fetch(block.block_id, block.key, block.start, block.end))
        if seq.awaits:
            self._awaiting[seq.seq_id] = seq

    def num_lacking(self, ahead: Seq[Block], going: Collection[Block] = ()) -> int:
        """How many of the blocks up to these take memory in addition."""
        if not ahead:
            return 0
        path = ahead[-1].path
        return len(path) - sum(block not in going for block in self._here(path))

    @property
    def num_awaiting(self) -> int:
        """Sequences that wait for blocks from disk."""
        return len(self._awaiting)

    @property
    def pinned(self) -> set[Block]:
        """Blocks that are coming, and those before them. Each is there, or gone, when a plan under way is done."""
        return {before for seq in self._awaiting.values() for block in seq.awaits for before in block.path}

    def coming(self) -> Iterable[Key]:
        """The keys of what is being read."""
        return (block.key for seq in self._awaiting.values() for block in seq.awaits)

    # -- keeping what was computed -------------------------------------------------------------

    def store_full_blocks(self, seq: Sequence, used: KVUse) -> None:
        """Keep the blocks that a sequence's planned tokens complete. The next plan says so, before anything else.
        ``used``: by all that run."""
        while (end := (len(seq.blocks) + 1) * BLOCK) <= min(seq.num_sure, self._reach(seq)):
            if not self._store(seq, end, used):
                return

    def store_rest(self, seq: Sequence, used: KVUse) -> None:
        """The last block, though it is not full: a conversation goes on from here."""
        self.store_full_blocks(seq, used)  # a result may have brought many tokens
        end = min(seq.num_sure, self._reach(seq))
        has_gone_on = self._config.whole_blocks and end < seq.num_sure  # a state stands for all tokens so far
        if end > len(seq.blocks) * BLOCK and not has_gone_on:
            self._store(seq, end, used)
        if seq.session is not None and seq.blocks:
            self.sessions[seq.session] = seq.blocks[-1]
            self.sessions.move_to_end(seq.session)
            while len(self.sessions) > self._config.max_sessions:
                self.sessions.popitem(last=False)

    def swap_out(self, seq: Sequence) -> None:
        """A sequence gives up its KV: have what is not on disk written there. The next plan says so, before that goes.
        The caches must be able to give any positions."""
        if not (self._config.on_disk and self._config.keeps_blocks) or self._config.whole_blocks:
            return
        parent, end = self.tree.root, min(seq.num_sure, self._reach(seq))
        for start in range(0, end, BLOCK):
            tokens = tuple(seq.tokens[start : min(start + BLOCK, end)])
            key = chained(parent, tokens)
            if self.disk.get(key) is None and key not in self._unwritten:
                block_id = self.tree.new_id()
                self._saves.append(Save(block_id, seq.seq_id, start, start + len(tokens), parent, tokens))
                self._dropped.append(block_id)
                self._expect(DiskBlock(parent, tokens), key)
                self.num_swapped += len(tokens)
            parent = key

    def _expect(self, kept: DiskBlock, key: Key) -> None:
        self._unwritten[key] = _Unwritten(kept)
        if len(self._unwritten) > _MOST_UNWRITTEN:
            self._unwritten.popitem(last=False)

    def _store(self, seq: Sequence, end: int, used: KVUse) -> bool:
        """Keep a sequence's tokens from its last stored block to ``end``; whether there is a place for them."""
        parent, start = seq.blocks[-1] if seq.blocks else None, len(seq.blocks) * BLOCK
        seq.is_stored &= self._config.keeps_blocks and (parent is None or parent.is_here)
        if not seq.is_stored:
            return False
        self.tree.use(seq.blocks)
        tokens = tuple(seq.tokens[start:end])
        block = self.tree.child(parent, tokens)
        if block is None:
            if not self._make_room(seq.blocks, used):
                seq.is_stored = False
                return False
            block = self._add(parent, tokens)
            self._saves.append(self._save(block, seq))
        seq.blocks.append(block)
        return True

    def _add(self, parent: Block | None, tokens: tuple[int, ...]) -> Block:
        block, outdone = self.tree.add(parent, tokens)
        self._drop(outdone)
        return block

    def _drop(self, gone: Iterable[Block]) -> None:
        """The stages forget blocks that the index has forgotten, if they have heard of them."""
        going = {block.block_id for block in gone}
        unread = {fetch.block_id for fetch in self._fetches} & going
        if unread:
            self._fetches = deque(fetch for fetch in self._fetches if fetch.block_id not in unread)
        if going:
            self._release()  # whoever waits for one of them: a longer block may have taken its place
        self._dropped += sorted(going - unread)

    def _save(self, block: Block, seq: Sequence) -> Save:
        if not self._config.on_disk or self.disk.get(block.key) is not None:
            return Save(block.block_id, seq.seq_id, block.start, block.end)
        parent = self.tree.root if block.parent is None else block.parent.key
        self._expect(DiskBlock(parent, block.tokens), block.key)
        return Save(block.block_id, seq.seq_id, block.start, block.end, parent, block.tokens)

    def _make_room(self, keep: Collection[Block], used: KVUse) -> bool:
        """Let blocks go, the least recently used first, until one more fits; those in ``keep`` stay."""
        going: list[Block] = []
        use = used + self.use + STORED_BLOCK
        pinned, candidates = self.pinned, self.tree.evictable()
        while not self._budget.fits(use):
            block = next(candidates, None)
            if block is None:
                return False
            if block not in keep and block not in pinned:
                going.append(block)
                use -= STORED_BLOCK
        for block in going:
            self.evict(block)
        return True

    # -- letting go ----------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        """Let a leaf go from memory."""
        self.tree.remove(block)
        self._drop([block])

    def forget(self, session: str) -> None:
        """Forget a session: the KV that nobody else begins with goes."""
        block, pinned = self.sessions.pop(session, None), self.pinned
        if block is not None and block.is_here:
            for one in list(self.tree.only_for(block)):
                if one in pinned:
                    return
                self.evict(one)

    def leave(self, seq: Sequence) -> None:
        """A sequence waits no longer for what it has asked for."""
        self._awaiting.pop(seq.seq_id, None)
        seq.awaits = []

    def clear(self, kept: Iterable[DiskBlock]) -> None:
        """The stages have forgotten everything but what is on disk."""
        for pending in (self._saves, self._dropped, self._fetches, self._erased, self._unwritten, self.sessions):
            pending.clear()
        for seq in list(self._awaiting.values()):
            self.leave(seq)
        self.tree.clear()
        self.disk.clear()
        self._erased += self.disk.plant(kept)

    # -- learning ------------------------------------------------------------------------------

    def learn(self, plan: StepPlan, figures: Iterable[StageFigures]) -> None:
        """Take in what the stages say of a plan's fetches, and of what they have written."""
        figures = tuple(figures)
        lacking = {block_id for each in figures for block_id in each.lacking}
        for fetch in plan.fetches:
            block = self.tree.get(fetch.key)
            if block is not None and block.block_id == fetch.block_id:
                self._arrive(block, was_read=fetch.block_id not in lacking)
        if plan.fetches:
            self._release()
            self._clock(plan, figures)
        for each in figures:
            for key in each.written:
                self._wrote(key, each.stage, num_stages=len(figures))

    def _clock(self, plan: StepPlan, figures: Seq[StageFigures]) -> None:
        """What reading a token has taken, on the stage that took longest."""
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
            self.tree.use(block.path)
            return
        on_disk = self.disk.get(block.key)
        if on_disk is not None:
            self.disk.remove_all(on_disk)
        self._drop(self.tree.remove_all(block))

    def _release(self) -> None:
        """Sequences whose blocks have all arrived, or will not, wait no longer."""
        for seq in list(self._awaiting.values()):
            seq.awaits = [block for block in seq.awaits if block.is_here and block.is_coming]
            if not seq.awaits:
                self.leave(seq)

    def _wrote(self, key: Key, stage: int, num_stages: int) -> None:
        unwritten = self._unwritten.get(key)
        if unwritten is None:
            return
        unwritten.written_by.add(stage)
        if len(unwritten.written_by) < num_stages:
            return
        del self._unwritten[key]
        self._put_on_disk(unwritten.kept)

    def _put_on_disk(self, kept: DiskBlock) -> None:
        parent = None if kept.parent == self.disk.root else self.disk.get(kept.parent)
        is_orphan = parent is None and kept.parent != self.disk.root
        if is_orphan or self.disk.get(chained(kept.parent, kept.tokens)) is not None:
            return
        _, outdone = self.disk.add(parent, kept.tokens)
        self._erased += [one.key for one in outdone]

    # -- invariants ----------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must always hold; tests call it."""
        self.tree.check()
        self.disk.check()
        assert len(self.sessions) <= self._config.max_sessions
        awaited = {block for seq in self._awaiting.values() for block in seq.awaits}
        for seq in self._awaiting.values():
            assert seq.awaits, "a sequence waits for nothing"
        for block in awaited:
            assert block.is_here
            assert block.is_coming
