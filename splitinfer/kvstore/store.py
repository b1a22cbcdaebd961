"""Stores one stage's blocks on disk.

The caller's thread reads a block at once, because the step that fetches it needs it. Blocks are written in the
background, by a thread that carries out the commands in order:

    put, touch, erase -> queue -> [ make room, write, rename ] -> reported by ``written``

A failure there is logged in one line, and the block is not reported, so it will not be fetched.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from splitinfer.core.kv.block_tree import KEY_BYTES, Key
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.index import FileName, lineage, surplus
from splitinfer.kvstore.record import Buffer, Damaged, Record
from splitinfer.system import qos

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 2**30  # in memory, waiting for the writer
_MAX_OFFERED = 10_000  # blocks; the first stage reads the header of each when it starts
_EXTRA = 20  # evict this fraction of the cap (1/20) more than necessary
_SCAN_EVERY = 60.0  # seconds between scans for files of other processes
CLOSE_SECONDS = 10.0  # the most that an ending process waits for its blocks to reach the disk
_MAX_SHARE = 0.5  # of the bytes that would be free on the disk without the folder


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a machine stores KV, and the most bytes that it may take."""

    path: Path
    cap_bytes: int


def seconds_to_close(disk: Disk | None) -> float:
    """Return the extra seconds that a process may need to shut down because it still writes KV to ``disk``."""
    return 0.0 if disk is None else CLOSE_SECONDS


class KVStore:
    """The blocks of one ``group``: the ``layers`` [first, last) of each. ``about`` describes the group for people.

    ``offer``, ``get``, ``put``, ``touch``, ``erase`` and ``written`` never wait for a write, and never raise because of
    the disk.
    """

    def __init__(self, disk: Disk, group: str, layers: tuple[int, int], about: dict[str, str]) -> None:
        self._folder, self._cap, self._group = Folder(disk.path), disk.cap_bytes, group
        self._layers = layers
        self._about = about
        self._lock = threading.Lock()  # for the three below
        self._names: dict[Key, FileName] = {}
        self._written: list[Key] = []
        self._queued_bytes = 0
        self._total, self._scanned = 0, float("-inf")  # bytes of all groups, and when they were counted
        self._has_warned = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-writer", daemon=True)
        self._thread.start()

    # -- stored blocks -------------------------------------------------------------------------

    def offer(self) -> tuple[Key, ...]:
        """Return the keys of the blocks that are on this disk, the last used first."""
        with self._lock:  # the writer adds its files afterwards
            files = sorted(self._folder.files(self._group), key=lambda file: -file.used)
            self._names = {file.name.key: file.name for file in files if file.name.layers == self._layers}
            return tuple(self._names)[:_MAX_OFFERED]

    def headers(self, keys: Iterable[Key]) -> list[Record]:
        """Return the headers of these blocks; leave out unreadable ones."""
        read = (self._read(key, lambda name: self._folder.header(self._group, name)) for key in keys)
        return [record for record in read if record is not None]

    def get(self, key: Key) -> tuple[Record, list[memoryview]] | None:
        """Read a block: its header, and its arrays' bytes. Return None if it is missing or damaged."""
        found = self._read(key, lambda name: self._folder.read(self._group, name))
        self.touch([key])
        return found

    def written(self) -> tuple[Key, ...]:
        """Return the keys of the blocks written since the last call."""
        with self._lock:
            written, self._written = tuple(self._written), []
        return written

    # -- commands ------------------------------------------------------------------------------

    def put(self, record: Record, buffers: Sequence[Buffer]) -> None:
        """Write a block's layers in the background, unless they are on the disk. ``buffers`` must not change any more.
        A block is skipped if its predecessor is not on the disk, because it could not be used."""
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if len(record.parent) != KEY_BYTES:
            log.warning("a block of KV is not written to disk: its parent's key has the wrong length")
            return
        with self._lock:
            if self._queued_bytes + size > _MAX_QUEUED_BYTES:
                log.info("a block of KV is not written to disk: %d bytes are waiting to be written", self._queued_bytes)
                return
            self._queued_bytes += size
        self._commands.put(lambda: self._put(record, buffers, size))

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark these blocks as used now."""
        self._commands.put(lambda: self._for_each(keys, self._folder.touch))

    def erase(self, keys: Sequence[Key]) -> None:
        """Remove blocks that will not be fetched again."""
        self._commands.put(lambda: self._for_each(keys, self._remove))

    def close(self, seconds: float) -> None:
        """Carry out the queued commands, for at most ``seconds``, and end."""
        self._commands.put(None)
        self._thread.join(seconds)

    # -- the writer ----------------------------------------------------------------------------

    def _work(self) -> None:
        qos.write_behind()
        while (command := self._commands.get()) is not None:
            try:
                command()
            except Exception:
                log.exception("a command to the KV folder failed")
            command = None  # while the thread waits for the next one, it does not hold a block in memory

    def _put(self, record: Record, buffers: Sequence[Buffer], size: int) -> None:
        name = FileName(record.key, record.parent, record.start, record.end, *self._layers)
        try:
            if name.key not in self._names:
                if record.start and record.parent not in self._names:
                    log.info("a block of KV is not written to disk: its predecessor is not there")
                    return
                self._make_room(size, record.parent)
                self._total += self._folder.write(self._group, name, record, buffers)
                self._has_warned = False
                with self._lock:
                    self._names[name.key] = name
        except OSError as error:
            if not self._has_warned:  # warn once, until a write succeeds again
                why = error.strerror or error
                log.warning("KV cannot be stored in %s: %s; it is kept in memory only", self._folder.path, why)
            self._has_warned = True
            return
        finally:
            with self._lock:
                self._queued_bytes -= size
        with self._lock:
            self._written.append(name.key)

    def _make_room(self, size: int, parent: Key) -> None:
        """Evict the least recently used files of all groups until ``size`` more bytes fit under the cap. Keep the files
        of ``parent`` and of the blocks before it, because the new block needs them."""
        now = time.monotonic()
        if now - self._scanned > _SCAN_EVERY:
            self._folder.sweep()
            self._folder.describe(self._group, self._about)
            self._total = sum(file.nbytes for file in self._folder.all_files())
            self._scanned = now
        cap = min(self._cap, int((self._total + self._folder.free_bytes()) * _MAX_SHARE))
        if size > cap:
            raise OSError(f"a block takes {size:,} bytes, but only {cap:,} may be used")
        if self._total + size <= cap:
            return
        files = self._folder.all_files()
        protected = lineage(files, self._group, parent)
        left = cap - size - sum(file.nbytes for file in protected)
        if left < 0:
            raise OSError("the blocks before it take all the room")
        # Evict some more than necessary, because every scan of a large folder takes long.
        evicted = surplus([file for file in files if file not in protected], max(0, left - cap // _EXTRA))
        for file in evicted:
            self._remove(file.group, file.name)
        self._total = sum(file.nbytes for file in files) - sum(file.nbytes for file in evicted)

    def _for_each(self, keys: Iterable[Key], act: Callable[[str, FileName], None]) -> None:
        for key in keys:
            if (name := self._names.get(key)) is not None:
                act(self._group, name)

    def _remove(self, group: str, name: FileName) -> None:
        self._folder.remove(group, name)
        if group == self._group and name.layers == self._layers:
            self._forget(name.key)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._names.pop(key, None)

    def _read(self, key: Key, read: Callable[[FileName], T]) -> T | None:
        """Apply ``read`` to a block's file, if it has one. If it is damaged remove it, if it is missing forget it, and
        return None."""
        if (name := self._names.get(key)) is None:
            return None
        try:
            return read(name)
        except Damaged as error:
            log.warning("the KV file %s is damaged and was removed: %s", name, error)
            self._folder.remove(self._group, name)
        except OSError as error:
            log.info("cannot read the KV file %s: %s", name, error.strerror or error)
        self._forget(key)
        return None
