"""Measures how fast a disk is read in blocks at random places, as a stage reads experts."""

import contextlib
import fcntl
import mmap
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

READERS = 16
"""Threads that read at the same time; an SSD needs many reads at once to be fast."""

_FILE, _PIECE = 512 * 2**20, 8 * 2**20  # bytes of the file, and of each write


def read_speed(folder: Path, block: int, seconds: float = 0.5) -> float | None:
    """Return the bytes a second that the disk of ``folder`` gives when ``READERS`` threads read blocks of ``block``
    bytes for ``seconds`` seconds. Return None if a file of 512 MB cannot be written there."""
    block = max(mmap.PAGESIZE, min(block, _FILE // 4))
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder, buffering=0) as made, ThreadPoolExecutor(READERS) as readers:
            _fill(made)
            ends = time.monotonic() + seconds
            total = sum(readers.map(lambda reader: _read(made.fileno(), block, reader, ends), range(READERS)))
            return total / (time.monotonic() - ends + seconds)
    return None


def _fill(made: IO[bytes]) -> None:
    """Write a file that is on the disk and in no cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(made.fileno(), fcntl.F_NOCACHE, 1)
    piece = os.urandom(_PIECE)
    for _ in range(_FILE // _PIECE):
        made.write(piece)
    os.fsync(made.fileno())
    if sys.platform != "darwin":
        os.posix_fadvise(made.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: int, block: int, seed: int, ends: float) -> int:
    """Read blocks at random places until ``ends``, and return the number of bytes."""
    places, count = random.Random(seed), 0
    with mmap.mmap(-1, block) as memory:
        while time.monotonic() < ends:
            count += os.preadv(file, [memory], places.randrange(0, _FILE - block))
    return count
