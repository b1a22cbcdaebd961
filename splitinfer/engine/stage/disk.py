"""A stage's blocks between memory and disk: arrays to bytes and back, and the keys reported to the coordinator.

A stage reads and writes one group of files. Its name covers everything that the KV depends on: the model and formats,
which the coordinator sends, this machine's dtype, device and BLAS, and the rank, if it has half of each layer.
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
from splitinfer.wire.messages import Load

log = logging.getLogger(__name__)


def group_of(command: Load, dtype: str | None) -> str:
    """Return the name of the group of files for a stage that computes in ``dtype`` (``None``: the weights' dtype)."""
    arithmetic = f"{dtype} {device_name()} {'openblas' if has_openblas() else ''}"
    arithmetic += "" if command.half is None else f" rank {command.half.rank}"  # a rank has the KV of its heads
    return hashlib.blake2b(command.kv_root + arithmetic.encode(), digest_size=8).hexdigest()


class StageDisk(KVStore):
    """The block files of the stage that ``command`` loads. Its own caches are at ``places``, and its blocks have the
    shapes of one of ``samples``. It computes in ``dtype``; ``None``: the weights' dtype."""

    def __init__(self, disk: Disk, command: Load, dtype: str | None, places: list[int], samples: list[KVBlock]) -> None:
        about = {"model": command.model, "dtype": dtype or "as the weights", "device": device_name()}
        super().__init__(disk, group_of(command, dtype), (command.start, command.end), about)
        self._places, self._samples = places, samples

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        """Return the blocks of these keys whose files can be read, with their tokens."""
        return tuple(record.kept for record in self.headers(keys))

    def write(self, save: Save, block: KVBlock) -> None:
        """Write a computed block, in the background."""
        parts = parts_of(block, self._places)
        if parts is None:
            return
        record = Record(save.parent, save.tokens, save.start, tuple(part for part, _ in parts.values()))
        self.put(record, [buffer for _, buffers in parts.values() for buffer in buffers])

    def read(self, fetch: Fetch) -> KVBlock | None:
        """Read a block. Return None if it is not stored or does not match the plan."""
        found = self.get(fetch.key)
        if found is None:
            return None
        try:
            return block_of(dict(_parts(*found)), self._places, self._samples, fetch.start, fetch.end)
        except ValueError as error:
            log.warning("a block of KV on disk does not fit this stage and is recomputed: %s", error)
            return None


def kept_here(disk: Disk, command: Load, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
    """Return the blocks of these keys, with their tokens, that another process of this machine has written for
    ``command``."""
    dtype = resolve_dtype(command.dtype)
    store = KVStore(disk, group_of(command, dtype), (command.start, command.end), {})
    try:
        store.offer()
        return tuple(record.kept for record in store.headers(keys))
    finally:
        store.close(0.0)


def _parts(
    record: Record, buffers: Iterable[memoryview]
) -> Iterable[tuple[CacheSlot, tuple[StoredPart, list[memoryview]]]]:
    """Yield a file's parts, each with its arrays. The caller checks the slots."""
    arrays = iter(buffers)
    for part in record.parts:
        yield part.slot or (-1,), (part, [next(arrays) for _ in part.arrays])
