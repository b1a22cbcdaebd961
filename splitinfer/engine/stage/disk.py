"""A stage's blocks between memory and disk: arrays to bytes and back, and what the coordinator hears of it.

The group of files a stage reads and writes is named by everything its KV depends on: what the coordinator says of the
model and the formats, and what this machine makes of it (dtype, device, BLAS). So a change of any of these finds an
empty folder, and nothing has to be compared.
"""

import hashlib
import logging
from collections.abc import Iterable

from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.core.plan import Fetch, Save
from splitinfer.engine.versions import device_name
from splitinfer.kvstore.record import Part, Record
from splitinfer.kvstore.store import Disk, Found, KVStore
from splitinfer.models.batch_invariance import has_openblas
from splitinfer.models.kv_blocks import BlockPart, KVBlock, Slot, block_of, parts_of
from splitinfer.models.tensors import array_of, spec_of, to_buffer
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


def group_of(order: Load, dtype: str | None) -> str:
    """The name of the group of files for a stage that computes in ``dtype`` (``None``: as the weights are)."""
    arithmetic = f"{dtype} {device_name()} {'openblas' if has_openblas() else ''}"
    return hashlib.blake2b(order.kv_root + arithmetic.encode(), digest_size=8).hexdigest()


class StageDisk:
    """The files of a stage whose own caches are at ``places``, and whose blocks look like ``sample``."""

    def __init__(self, store: KVStore, places: list[int], sample: KVBlock) -> None:
        self._store, self._places, self._sample = store, places, sample

    @classmethod
    def open(cls, disk: Disk, order: Load, dtype: str | None, places: list[int], sample: KVBlock) -> "StageDisk":
        """The files for a stage that was loaded by ``order``."""
        about = {"model": order.model, "dtype": dtype or "as the weights", "device": device_name()}
        store = KVStore(disk, group_of(order, dtype), (order.start, order.end), about)
        return cls(store, places, sample)

    def offer(self) -> tuple[Key, ...]:
        """The keys of what is here."""
        return self._store.offer()

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        """The tokens of these blocks, as far as their files can be read."""
        return tuple(record.kept for record in self._store.headers(keys))

    def write(self, save: Save, block: KVBlock) -> None:
        """Write a block that has been computed, behind."""
        parts = parts_of(block, self._places)
        if parts is None:
            return
        record = Record(save.parent, save.tokens, save.start, tuple(_described(part) for part in parts))
        self._store.put(record, [to_buffer(array) for part in parts for array in part.arrays])

    def read(self, fetch: Fetch) -> KVBlock | None:
        """A block; ``None`` where it is not, or not what the plan says."""
        found = self._store.get(fetch.key)
        if found is None:
            return None
        try:
            parts = {part.slot: part for file in found for part in _parts(file) if part.slot[0] in self._places}
            return block_of(parts, self._places, self._sample, fetch.start, fetch.end)
        except ValueError as error:
            log.warning("a block of KV on disk does not fit this stage, and is computed again: %s", error)
            return None

    def touch(self, keys: list[Key]) -> None:
        """These were of use just now."""
        if keys:
            self._store.touch(keys)

    def erase(self, keys: tuple[Key, ...]) -> None:
        """Nobody will ask for these again."""
        if keys:
            self._store.erase(keys)

    def written(self) -> tuple[Key, ...]:
        """What has come to the disk since this was asked last."""
        return self._store.written()

    def close(self, seconds: float) -> None:
        """Write what is still to be written, for so long."""
        self._store.close(seconds)


def _described(part: BlockPart) -> Part:
    return Part(part.slot, part.by_token, part.start, part.end, tuple(map(spec_of, part.arrays)))


def _parts(file: Found) -> Iterable[BlockPart]:
    """A file's parts as arrays. Slots are checked by whoever looks for them."""
    buffers = iter(file.buffers)
    for part in file.record.parts:
        arrays = tuple(array_of(spec, next(buffers)) for spec in part.arrays)
        slot: Slot = part.slot or (-1,)
        yield BlockPart(slot, part.by_token, part.start, part.end, arrays)
