"""One stage's blocks on disk.

Reading happens when it is asked for, in the asker's thread: the step that asks has nothing better to do. Writing is
done behind, by a thread of its own, in the order of the orders:

    put, touch, erase -> queue -> [ make room, write, rename ] -> told of by ``written``

What goes wrong there is one line of the log, and the block is not told of; so nobody will ask for it.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from splitinfer.core.kv.block_tree import KEY_BYTES, Key
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.index import FileName, KeptFile, covering, lineage, surplus
from splitinfer.kvstore.record import Buffer, Damaged, Record

T = TypeVar("T")

log = logging.getLogger(__name__)

_MOST_BEHIND = 2**30  # bytes that may wait to be written: they are kept in memory
_MOST_OFFERED = 10_000  # blocks; the first stage reads the header of each when it starts
_MORE = 20  # of the cap, the part that goes beyond what has to
_LOOK_EVERY = 60.0  # seconds between looks at what other processes have put into the folder
_MOST_OF_DISK = 0.5  # that the folder takes of what would be free without it


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a machine keeps KV, and how many bytes at most."""

    path: Path
    cap_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a block: its header, and its arrays in order."""

    record: Record
    buffers: list[memoryview]


class KVStore:
    """Layers [first, last) of the blocks of one ``group``. ``about`` says for people what that is.

    ``offer``, ``get``, ``put``, ``touch``, ``erase`` and ``written`` never wait for the disk to be written, and never
    raise because of it.
    """

    def __init__(self, disk: Disk, group: str, layers: tuple[int, int], about: dict[str, str]) -> None:
        self._folder, self._cap, self._group = Folder(disk.path), disk.cap_bytes, group
        self._first, self._last = layers
        self._about = about
        self._lock = threading.Lock()  # for the three below
        self._names: dict[Key, set[FileName]] = defaultdict(set)
        self._written: list[Key] = []
        self._bytes_behind = 0
        self._total, self._looked = 0, float("-inf")  # bytes of all groups, and when that was counted
        self._has_complained = False
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-writer", daemon=True)
        self._thread.start()

    # -- what there is -------------------------------------------------------------------------

    def offer(self) -> tuple[Key, ...]:
        """The keys of the blocks of which all own layers are here, the last used first."""
        names: dict[Key, set[FileName]] = defaultdict(set)
        with self._lock:  # what is written meanwhile is added afterwards
            files = self._folder.files(self._group)
            for file in files:
                names[file.name.key].add(file.name)
            self._names = names
            last_first = sorted(files, key=lambda file: -file.used)
            keys = dict.fromkeys(file.name.key for file in last_first)
            return tuple(key for key in keys if self._covering(names[key]) is not None)[:_MOST_OFFERED]

    def headers(self, keys: Iterable[Key]) -> list[Record]:
        """The headers of these blocks, as far as they can be read."""
        found: list[Record] = []
        for key in keys:
            for name in self._covering(self._names_of(key)) or ():
                record = self._read(name, lambda name: self._folder.header(self._group, name))
                if record is not None:
                    found.append(record)
                    break
        return found

    def get(self, key: Key) -> list[Found] | None:
        """The files that hold a block's own layers together; ``None`` if they are not all here."""
        found: list[Found] = []
        for name in self._covering(self._names_of(key)) or ():
            read = self._read(name, lambda name: self._folder.read(self._group, name))
            if read is None:
                return None
            found.append(Found(*read))
        self.touch([key])
        return found or None

    def written(self) -> tuple[Key, ...]:
        """The keys that have come to the disk since this was asked last."""
        with self._lock:
            said, self._written = tuple(self._written), []
        return said

    # -- orders --------------------------------------------------------------------------------

    def put(self, record: Record, buffers: Sequence[Buffer]) -> None:
        """Write a block's own layers behind, unless they are there. ``buffers`` are not changed any more, and kept
        until then. Where the block before it is not there it is of no use, and not written."""
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if len(record.parent) != KEY_BYTES:
            log.warning("a block of KV is not written to disk: its parent's key is none of ours")
            return
        with self._lock:
            if self._bytes_behind + size > _MOST_BEHIND:
                log.info("a block of KV is not written to disk: %d bytes wait already", self._bytes_behind)
                return
            self._bytes_behind += size
        self._orders.put(lambda: self._put(record, buffers, size))

    def touch(self, keys: Sequence[Key]) -> None:
        """These blocks were used just now."""
        self._orders.put(lambda: self._for_each(keys, self._folder.touch))

    def erase(self, keys: Sequence[Key]) -> None:
        """Nobody will ask for these blocks again."""
        self._orders.put(lambda: self._for_each(keys, self._remove))

    def flush(self, seconds: float) -> bool:
        """Wait for what was ordered; whether it was done by then."""
        done = threading.Event()
        self._orders.put(done.set)
        return done.wait(seconds)

    def close(self, seconds: float) -> None:
        """Let the orders be carried out, for so long, and end."""
        self._orders.put(None)
        self._thread.join(seconds)

    # -- the writer ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                order()
            except Exception:
                log.exception("an order to the KV folder failed")

    def _put(self, record: Record, buffers: Sequence[Buffer], size: int) -> None:
        name = FileName(record.key, record.parent, record.start, record.end, self._first, self._last)
        try:
            if not self._holds(name.key):
                if record.start and not self._holds(record.parent):
                    log.info("a block of KV is not written to disk: the one before it is not there")
                    return
                self._make_room(size, record.parent)
                self._total += self._folder.write(self._group, name, record, buffers)
                self._has_complained = False
                with self._lock:
                    self._names[name.key].add(name)
        except OSError as error:
            self._complain(f"KV cannot be kept in {self._folder.path}: {error.strerror or error}")
            return
        finally:
            with self._lock:
                self._bytes_behind -= size
        with self._lock:
            self._written.append(name.key)

    def _make_room(self, size: int, parent: Key) -> None:
        """Let the least recently used files go, whoever's, so that ``size`` bytes more are within the cap; those of
        ``parent`` and before it stay, or what is to be written would be of no use."""
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY:
            self._folder.sweep()
            self._folder.describe(self._group, self._about)
            self._total = sum(file.nbytes for file in self._folder.all_files())
            self._looked = now
        cap = min(self._cap, int((self._total + self._folder.free_bytes()) * _MOST_OF_DISK))
        if size > cap:
            raise OSError(f"a block takes {size:,} bytes, and there is place for {cap:,}")
        if self._total + size <= cap:
            return
        files = self._folder.all_files()
        staying = lineage(files, self._group, parent)
        left = cap - size - sum(file.nbytes for file in staying)
        if left < 0:
            raise OSError("what comes before a block takes all the place there is")
        # Some more than needs be: to look through the folder takes longer the more there is in it.
        going = surplus([file for file in files if file not in staying], max(0, left - cap // _MORE))
        for file in going:
            self._folder.remove(file.group, file.name)
            self._forget(file)
        self._total = sum(file.nbytes for file in files) - sum(file.nbytes for file in going)

    def _forget(self, file: KeptFile) -> None:
        if file.group == self._group:
            with self._lock:
                self._names[file.name.key].discard(file.name)

    def _for_each(self, keys: Iterable[Key], act: Callable[[str, FileName], None]) -> None:
        for key in keys:
            for name in self._names_of(key):
                act(self._group, name)

    def _remove(self, group: str, name: FileName) -> None:
        self._folder.remove(group, name)
        with self._lock:
            self._names[name.key].discard(name)

    def _complain(self, sentence: str) -> None:
        """Once, until it works again."""
        if not self._has_complained:
            log.warning("%s; it is kept in memory only", sentence)
        self._has_complained = True

    # -- reading -------------------------------------------------------------------------------

    def _names_of(self, key: Key) -> tuple[FileName, ...]:
        with self._lock:
            return tuple(self._names.get(key, ()))

    def _holds(self, key: Key) -> bool:
        return self._covering(self._names_of(key)) is not None

    def _covering(self, names: Iterable[FileName]) -> tuple[FileName, ...] | None:
        return covering(names, self._first, self._last)

    def _read(self, name: FileName, read: Callable[[FileName], T]) -> T | None:
        """What ``read`` makes of a file; a damaged one goes, and so does one that is not there, from the list."""
        try:
            return read(name)
        except Damaged as error:
            log.warning("the file of KV %s is damaged, and removed: %s", name, error)
            self._remove(self._group, name)
        except OSError as error:
            log.info("the file of KV %s cannot be read: %s", name, error.strerror or error)
            with self._lock:
                self._names[name.key].discard(name)
        return None
