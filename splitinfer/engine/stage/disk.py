"""A stage's blocks between memory and disk: arrays to bytes and back, and the keys reported to the coordinator.

The group of files that a stage reads and writes is named after everything its KV depends on: the model and the formats,
which the coordinator sends, this machine's dtype, device and BLAS, and which half of the layers it has. So after a
change of any of these the folder is empty, and nothing has to be compared.
"""

import hashlib
import logging
from collections.abc import Iterable

from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.core.kv.part import Part
from splitinfer.core.plan import Fetch, Save
from splitinfer.engine.versions import device_name
from splitinfer.kvstore.record import Record
from splitinfer.kvstore.store import Disk, KVStore
from splitinfer.models.blas import has_openblas
from splitinfer.models.kv_blocks import KVBlock, Slot, block_of, parts_of
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


def group_of(command: Load, dtype: str | None) -> str:
    """The name of the group of files for a stage that computes in ``dtype`` (``None``: as the weights are)."""
    arithmetic = f"{dtype} {device_name()} {'openblas' if has_openblas() else ''}"
    arithmetic += "" if command.half is None else f" rank {command.half.rank}"  # a rank has the KV of its heads
    return hashlib.blake2b(command.kv_root + arithmetic.encode(), digest_size=8).hexdigest()


class StageDisk:
    """The block files of a stage whose own caches are at ``places``, and whose blocks are shaped like ``sample``."""

    def __init__(self, store: KVStore, places: list[int], sample: KVBlock) -> None:
        self._store, self._places, self._sample = store, places, sample

    @classmethod
    def open(cls, disk: Disk, command: Load, dtype: str | None, places: list[int], sample: KVBlock) -> "StageDisk":
        """The block files of the stage that ``command`` loads."""
        about = {"model": command.model, "dtype": dtype or "as the weights", "device": device_name()}
        store = KVStore(disk, group_of(command, dtype), (command.start, command.end), about)
        return cls(store, places, sample)

    def offer(self) -> tuple[Key, ...]:
        """The keys of the stored blocks."""
        return self._store.offer()

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        """These blocks with their tokens, as far as their files can be read."""
        return tuple(record.kept for record in self._store.headers(keys))

    def write(self, save: Save, block: KVBlock) -> None:
        """Write a computed block, in the background."""
        parts = parts_of(block, self._places)
        if parts is None:
            return
        record = Record(save.parent, save.tokens, save.start, tuple(part for part, _ in parts.values()))
        self._store.put(record, [buffer for _, buffers in parts.values() for buffer in buffers])

    def read(self, fetch: Fetch) -> KVBlock | None:
        """Read a block; ``None`` if it is not stored, or is not what the plan says."""
        found = self._store.get(fetch.key)
        if found is None:
            return None
        try:
            parts = {slot: part for file in found for slot, part in _parts(*file) if slot[0] in self._places}
            return block_of(parts, self._places, self._sample, fetch.start, fetch.end)
        except ValueError as error:
            log.warning("a block of KV on disk does not fit this stage and is recomputed: %s", error)
            return None

    def touch(self, keys: list[Key]) -> None:
        """Mark these blocks as used now."""
        if keys:
            self._store.touch(keys)

    def erase(self, keys: tuple[Key, ...]) -> None:
        """Remove blocks that will not be fetched again."""
        if keys:
            self._store.erase(keys)

    def written(self) -> tuple[Key, ...]:
        """The keys of the blocks written since the last call."""
        return self._store.written()

    def close(self, seconds: float) -> None:
        """Write the blocks still in the queue, for at most ``seconds``."""
        self._store.close(seconds)


def kept_here(disk: Disk, command: Load, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
    """These blocks with their tokens, as far as another process of this machine has written them for ``command``."""
    dtype = resolve_dtype(command.dtype, gpu=on_gpu())
    store = KVStore(disk, group_of(command, dtype), (command.start, command.end), {})
    try:
        store.offer()
        return tuple(record.kept for record in store.headers(keys))
    finally:
        store.close(0.0)


def _parts(record: Record, buffers: Iterable[memoryview]) -> Iterable[tuple[Slot, tuple[Part, list[memoryview]]]]:
    """A file's parts, each with its arrays. Slots are checked by the caller."""
    arrays = iter(buffers)
    for part in record.parts:
        yield part.slot or (-1,), (part, [next(arrays) for _ in part.arrays])
