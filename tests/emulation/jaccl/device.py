"""What is registered on a device. It outlives processes, as the kernel's book-keeping does.

A group's registration is a file that its process keeps locked, so the system shows when the process has ended, however
that happens. The file's only byte says whether the process is within a receive; it is mapped, so that the last value
is there after SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REGIONS_OF_GROUP = 64  # 8 sizes, 2 buffers of each, 4 kinds (source: the mesh of two)
_IDLE, _RECEIVING = 0, 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has."""

    regions: int = 100
    queue_pairs: int = 10


@dataclass(frozen=True, slots=True)
class Usage:
    """`num_left`: groups whose process was killed within a receive."""

    num_alive: int
    num_left: int

    @property
    def regions(self) -> int:
        return REGIONS_OF_GROUP * self.queue_pairs

    @property
    def queue_pairs(self) -> int:
        return self.num_alive + self.num_left


class Registration:
    """A group's, held by its process until that ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb+")
        self._file.write(bytes([_IDLE]))
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._state = mmap.mmap(self._file.fileno(), 1)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """The process is within a receive."""
        self._state[0] = _RECEIVING
        yield
        self._state[0] = _IDLE

    def close(self) -> None:
        """As the end of the process does."""
        self._state.close()
        self._file.close()


class Device:
    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits

    def register(self) -> Registration:
        """Take what a group of two needs. Raises RuntimeError with JACCL's text when the device has no more."""
        with self._locked():
            used = self._count()
            if used.queue_pairs + 1 > self._limits.queue_pairs:
                raise RuntimeError("[jaccl] Couldn't create queue pair")
            if used.regions + REGIONS_OF_GROUP > self._limits.regions:
                raise RuntimeError("[jaccl] Register memory region failed")
            return Registration(self._folder / f"{secrets.token_hex(8)}.group")

    def usage(self) -> Usage:
        with self._locked():
            return self._count()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _count(self) -> Usage:
        """The usage, when processes that have ended since are accounted for."""
        num_alive = 0
        for path in self._folder.glob("*.group"):
            with path.open("rb") as file:
                if not _is_owned(file.fileno()):
                    if file.read(1) == bytes([_RECEIVING]):
                        path.rename(path.with_suffix(".left"))
                    else:
                        path.unlink()
                    continue
            num_alive += 1
        return Usage(num_alive, num_left=len(list(self._folder.glob("*.left"))))


def _is_owned(descriptor: int) -> bool:
    """Whether a living process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
