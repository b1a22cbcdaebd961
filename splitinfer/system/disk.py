"""Measures how fast a disk is read in blocks at random places, as a stage reads experts."""

import contextlib
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

READERS = 16
"""Threads that read at the same time; an SSD needs many reads at once to be fast."""

_FILE, _PIECE = 512 * 2**20, 8 * 2**20  # bytes of the file, and of each write
_NO_CACHE = 48  # macOS's F_NOCACHE, which Python's fcntl module names there only


def read_speed(folder: Path, block: int, seconds: float = 0.5) -> float | None:
    """Return the bytes a second that the disk of ``folder`` gives when ``READERS`` threads read blocks of ``block``
    bytes for ``seconds`` seconds. Return None if a file of 512 MB cannot be written there."""
    block = max(mmap.PAGESIZE, min(block, _FILE // 4))
    with contextlib.suppress(OSError), _file(folder) as file:
        began, random_places = time.monotonic(), random.Random(0)
        places = [random_places.randrange(0, _FILE - block) for _ in range(4096)]

        def read(reader: int) -> int:
            memory, count = mmap.mmap(-1, block), 0
            with memory:
                for at in places[reader::READERS]:
                    if time.monotonic() - began > seconds:
                        break
                    count += os.preadv(file, [memory], at)
            return count

        with ThreadPoolExecutor(READERS) as readers:
            total = sum(readers.map(read, range(READERS)))
        return total / (time.monotonic() - began)
    return None


@contextmanager
def _file(folder: Path) -> Iterator[int]:
    """Give the block the descriptor of a temporary file that is on the disk and in no cache."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder, buffering=0) as made:
        file = made.fileno()
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file, _NO_CACHE, 1)
        piece = os.urandom(_PIECE)
        for _ in range(_FILE // _PIECE):
            made.write(piece)
        os.fsync(file)
        if sys.platform != "darwin":
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        yield file
