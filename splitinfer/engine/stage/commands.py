"""A plan's commands to a stage besides computing: save, retain, free, open, drop, fetch and erase, in this order."""

import time
from collections.abc import Callable, Collection

import mlx.core as mx

from splitinfer.core.kv.block_tree import Key, chained
from splitinfer.core.plan import Fetch, NewSequence, Save, StepPlan
from splitinfer.engine.stage.disk import StageDisk
from splitinfer.engine.stage.history import History
from splitinfer.engine.stage.launched import Applied
from splitinfer.models.caches.kv_blocks import KVBlock, layer_by_layer
from splitinfer.models.cut.pictures import PictureTower
from splitinfer.models.rows.kv_pool import KVPool


class Commands:
    """Carries out commands on a stage's ``pool``, ``histories`` and ``disk``, and its ``tower`` for pictures.
    ``waits``: whether to wait until copies are computed; otherwise they are computed with the step. ``agree``: given
    which fetches succeeded here, returns which succeeded on all machines of the stage."""

    def __init__(
        self,
        pool: KVPool,
        histories: dict[int, History],
        disk: StageDisk | None,
        tower: PictureTower | None,
        agree: Callable[[list[bool]], list[bool]],
        *,
        waits: bool,
    ) -> None:
        self._pool, self._histories, self._disk, self._waits = pool, histories, disk, waits
        self._tower, self._agree = tower, agree
        self._keys: dict[int, Key] = {}  # by block id: the keys of blocks in memory that are also on disk

    def clear(self) -> None:
        """Forget every block and every picture."""
        self._keys.clear()
        if self._tower is not None:
            self._tower.clear()

    def apply(self, plan: StepPlan) -> Applied:
        """Carry out all commands of a plan."""
        if not plan.has_commands:
            return Applied()
        saved = [(save, self._pool.save(save.block_id, save.seq_id, save.start, save.end)) for save in plan.saves]
        for seq_id in plan.retained:
            self._pool.retain(seq_id)
        for seq_id in plan.freed:
            self._pool.free(seq_id)
        for seq_id in plan.ended:
            self._histories.pop(seq_id, None)
        if self._tower is not None:
            self._tower.open(plan.new, plan.ended)
        copied = [array for new in plan.new for array in self._open(new)]
        self._drop(plan)
        began = time.monotonic()
        are_here = self._agree([self._fetch(fetch) for fetch in plan.fetches])
        lacking = tuple(fetch.block_id for fetch, is_here in zip(plan.fetches, are_here, strict=True) if not is_here)
        fetching = time.monotonic() - began if plan.fetches else 0.0
        for_disk = self._for_disk(saved, plan.dropped)
        if self._disk is not None and plan.erased:
            self._disk.erase(plan.erased)
        applied = Applied(layer_by_layer([block for _, block in saved]), for_disk, fetching, lacking)
        applied.bytes_copied = sum(array.nbytes for array in copied)
        if not self._waits:  # waiting for the copies would also wait for the step in flight
            applied.pending += copied
            return applied
        mx.eval(applied.pending)  # until then a block shares its sequence's arrays, and the step would copy them
        if copied:  # waiting is rare and short here, and the only way to measure the copies
            began = time.monotonic()
            mx.eval(copied)
            applied.copying = time.monotonic() - began
        return applied

    def _open(self, new: NewSequence) -> list[mx.array]:
        """Begin a sequence, and return the arrays that are copied for it."""
        self._histories[new.seq_id] = History(new.params, new.seed, list(new.prefix), new.num_prompt)
        if new.takes_over is not None:
            self._pool.take_over(new.seq_id, new.takes_over, len(new.prefix), new.pictures)
            return []
        return self._pool.open(new.seq_id, new.blocks, len(new.prefix), new.pictures)

    def _drop(self, plan: StepPlan) -> None:
        """Drop the plan's blocks, and mark the blocks that new sequences begin with as used on disk."""
        if self._disk is not None:
            begun = {block_id for new in plan.new for block_id in new.blocks}
            if keys := [self._keys[block_id] for block_id in begun if block_id in self._keys]:
                self._disk.touch(keys)
        for block_id in plan.dropped:
            self._pool.drop(block_id)
            self._keys.pop(block_id, None)

    def _fetch(self, fetch: Fetch) -> bool:
        """Read a block from disk into the pool. Return whether that succeeded."""
        block = None if self._disk is None else self._disk.read(fetch)
        if block is None:
            return False
        self._pool.put(fetch.block_id, block)
        self._keys[fetch.block_id] = fetch.key
        return True

    def _for_disk(self, saved: list[tuple[Save, KVBlock]], dropped: Collection[int]) -> list[tuple[Save, KVBlock]]:
        """Return the saved blocks that go to disk. A block that the same plan has ``dropped`` remains only on disk."""
        found = [(save, block) for save, block in saved if save.is_for_disk and self._disk is not None]
        self._keys |= {
            save.block_id: chained(save.parent, save.tokens) for save, _ in found if save.block_id not in dropped
        }
        return found if self._waits else [(save, block.for_host()) for save, block in found]
