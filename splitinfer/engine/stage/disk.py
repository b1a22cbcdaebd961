"""A stage's blocks between memory and disk: arrays to bytes and back, and the keys reported to the coordinator.

The group of files that a stage reads and writes is named after everything its KV depends on: the model and the formats,
which the coordinator sends, this machine's dtype, device and BLAS, and which half of the layers it has.
"""

import hashlib
import logging
from collections.abc import Iterable

from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.core.plan import Fetch, Save, StoredPart
from splitinfer.engine.versions import device_name
from splitinfer.kvstore.record import Record
from splitinfer.kvstore.store import Disk, KVStore
from splitinfer.models.blas import has_openblas
from splitinfer.models.caches.kv_blocks import CacheSlot, KVBlock, block_of, parts_of
from splitinfer.models.load.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


def group_of(command: Load, dtype: str | None) -> str:
    """Return the name of the group of files for a stage that computes in ``dtype`` (``None``: as the weights are)."""
    arithmetic = f"{dtype} {device_name()} {'openblas' if has_openblas() else ''}"
    arithmetic += "" if command.half is None else f" rank {command.half.rank}"  # a rank has the KV of its heads
    return hashlib.blake2b(command.kv_root + arithmetic.encode(), digest_size=8).hexdigest()


class StageDisk(KVStore):
    """The block files of the stage that ``command`` loads, whose own caches are at ``places``, and whose blocks are
    shaped like ``sample``. ``dtype``: in which it computes; ``None``: as the weights are."""

    def __init__(self, disk: Disk, command: Load, dtype: str | None, places: list[int], sample: KVBlock) -> None:
        about = {"model": command.model, "dtype": dtype or "as the weights", "device": device_name()}
        super().__init__(disk, group_of(command, dtype), (command.start, command.end), about)
        self._places, self._sample = places, sample

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        """Return these blocks with their tokens, as far as their files can be read."""
        return tuple(record.kept for record in self.headers(keys))

    def write(self, save: Save, block: KVBlock) -> None:
        """Write a computed block, in the background."""
        parts = parts_of(block, self._places)
        if parts is None:
            return
        record = Record(save.parent, save.tokens, save.start, tuple(part for part, _ in parts.values()))
        self.put(record, [buffer for _, buffers in parts.values() for buffer in buffers])

    def read(self, fetch: Fetch) -> KVBlock | None:
        """Read a block; ``None`` if it is not stored, or is not what the plan says."""
        found = self.get(fetch.key)
        if found is None:
            return None
        try:
            parts = {slot: part for file in found for slot, part in _parts(*file) if slot[0] in self._places}
            return block_of(parts, self._places, self._sample, fetch.start, fetch.end)
        except ValueError as error:
            log.warning("a block of KV on disk does not fit this stage and is recomputed: %s", error)
            return None


def kept_here(disk: Disk, command: Load, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
    """Return these blocks with their tokens, as far as another process of this machine has written them for
    ``command``."""
    dtype = resolve_dtype(command.dtype, gpu=on_gpu())
    store = KVStore(disk, group_of(command, dtype), (command.start, command.end), {})
    try:
        store.offer()
        return tuple(record.kept for record in store.headers(keys))
    finally:
        store.close(0.0)


def _parts(
    record: Record, buffers: Iterable[memoryview]
) -> Iterable[tuple[CacheSlot, tuple[StoredPart, list[memoryview]]]]:
    """Yield a file's parts, each with its arrays. Slots are checked by the caller."""
    arrays = iter(buffers)
    for part in record.parts:
        yield part.slot or (-1,), (part, [next(arrays) for _ in part.arrays])
