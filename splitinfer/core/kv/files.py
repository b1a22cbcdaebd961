"""Which blocks of KV every stage has on disk, and which files are still expected.

A block counts as being on disk once all stages have reported that they wrote it. They report with the results of steps;
where no step is under way, ``ask`` has an empty plan go out for it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from splitinfer.core.kv.block_tree import BlockTree, DiskBlock, Key, chained
from splitinfer.core.plan import StageFigures

_MOST_ASKED = 60  # times for files without another block in between
_MOST_UNWRITTEN = 4096  # blocks whose files are expected; a stage whose disk is full never reports them


class BlockFiles:
    """``tree``: the blocks of which every stage has a file. Its parameters are ``BlockTree``'s."""

    def __init__(self, root: Key, *, whole_blocks: bool, block: int) -> None:
        self.tree = BlockTree(root, whole_blocks=whole_blocks, block=block)
        self._unwritten: OrderedDict[Key, tuple[DiskBlock, set[int]]] = OrderedDict()  # and the stages that have them
        self._erased: list[Key] = []
        self.is_asking, self._asks_left = False, 0  # whether the next plan goes though it has nothing to do

    def begin_with(self, kept: Iterable[DiskBlock]) -> None:
        """Begin again, with the blocks that are on every stage's disk."""
        self._unwritten.clear()
        self.tree.clear()
        self.is_asking, self._erased = False, self.tree.plant(kept)

    @property
    def has_changes(self) -> bool:
        """Whether the next plan has something to say of files."""
        return bool(self._erased or self.is_asking)

    def take_erased(self) -> tuple[Key, ...]:
        """The keys of files that will not be read again, for the next plan."""
        erased, self._erased, self.is_asking = tuple(self._erased), [], False
        return erased

    def expects(self, key: Key) -> bool:
        """Whether a block is being written."""
        return key in self._unwritten

    def expect(self, kept: DiskBlock, key: Key) -> None:
        """A block is to be written."""
        self._unwritten[key], self._asks_left = (kept, set()), _MOST_ASKED
        if len(self._unwritten) > _MOST_UNWRITTEN:
            self._unwritten.popitem(last=False)

    def ask(self) -> bool:
        """Have a plan go out though nothing else is to be done, because its result tells what was written since the
        last one; returns whether there is anything to ask for. Call it now and then while nothing is under way."""
        if self._unwritten and self._asks_left:
            self.is_asking, self._asks_left = True, self._asks_left - 1
        return self.is_asking

    def learn(self, figures: Seq[StageFigures]) -> None:
        """Take in from a step's figures which files were written."""
        for each in figures:
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
