"""Publishes this process's claims to the machine's memory, and reads the claims of the user's other processes.

    ~/Library/Caches/splitinfer/memory/HOST/    (macOS; elsewhere ~/.cache/...)
        lock              held while claims are read or written, so that two processes do not see the same bytes free
        PID-RANDOM        a claim; its process holds a lock on it (flock(2)), which the system gives up however it dies

If another process can lock a claim, its owner is gone, and the claim is removed. If files cannot be locked, nothing is
claimed: each process counts all free memory, as if it were alone. The system's free memory includes bytes that another
process is about to take, so a claim has

    held                bytes that MLX holds in its process now: the system does not call these free any more
    load                bytes that it will surely take, too: weights being read, KV of one context, room to compute
    growth              bytes that KV may take over time, if that is more than ``load``

and is rewritten as memory fills up. The coordinator divides the free memory among itself and the workers that it
starts: within such a *group* only ``load`` counts. For other processes the group also grows, by its largest growth:
each member announces half of the free memory, and gets a part of that.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic

from splitinfer.places import of_this_host

# -- claims, and the bytes that they leave. Pure -----------------------------------------------------------------------


_Count = Annotated[int, pydantic.Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Claim:
    """The bytes that one process claims. ``group``: the id of the process that divides memory among several, or its
    own."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    group: _Count
    held: _Count
    load: _Count
    growth: _Count = 0


CLAIM = pydantic.TypeAdapter(Claim)  # the content of a claim's file


@dataclass(frozen=True, slots=True)
class Others:
    """The bytes that other processes hold, and the bytes that they will take in addition."""

    held: int = 0
    to_come: int = 0


def settled(parts: Sequence[Claim], held: int) -> list[Claim]:
    """Return the claims of a process's parts, reduced by the bytes taken since, now that it holds ``held`` bytes.
    ``parts``: as announced, the oldest first. Taken bytes count for the newest part first, up to its claim."""
    found, accounted = list[Claim](), 0
    for part in reversed(parts):
        taken = min(max(0, held - part.held - accounted), max(part.load, part.growth))
        accounted += taken
        found.append(Claim(part.group, max(0, held), max(0, part.load - taken), max(0, part.growth - taken)))
    return found[::-1]


def merged(parts: Sequence[Claim], held: int) -> Claim:
    """Return the claim of a process that holds ``held`` bytes now. ``parts``: as for ``settled``; at least one."""
    now = settled(parts, held)
    return Claim(now[0].group, now[0].held, sum(part.load for part in now), sum(part.growth for part in now))


def sum_up(claims: Iterable[Claim], group: int) -> Others:
    """Return the bytes of these claims as a process of ``group`` counts them."""
    groups: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        groups[claim.group].append(claim)
    held = sum(claim.held for members in groups.values() for claim in members)
    return Others(held, sum(_to_come(members, is_own=number == group) for number, members in groups.items()))


def _to_come(members: list[Claim], *, is_own: bool) -> int:
    load = sum(claim.load for claim in members)
    return load if is_own else max(load, *(claim.growth for claim in members))


def left_over(available: int, limit: int | None, own: int, others: Others) -> int:
    """Return the bytes that a process may still take.

    Args:
        available: the system's free bytes.
        limit: the bytes that the GPU may hold for all processes together; None: unlimited.
        own: the bytes of them that this process holds.
        others: the claims of other processes.
    """
    left = available - others.to_come
    if limit is not None:
        left = min(left, limit - own - others.held - others.to_come)
    return max(0, left)


# -- the ledger --------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds for the lock, which is held for a millisecond: a longer holder was stopped
_SIZE = 200  # bytes of a claim's file: one write replaces it all, so no lock is needed


class Ledger:
    """The claims in ``folder``. All methods may be called from any thread.

    ``group``: the id of the process that divides memory among several (``Claim``).
    """

    def __init__(self, folder: Path, group: int) -> None:
        self._folder, self.group = folder, group
        self._own: tuple[Path, int] | None = None  # this process's claim, and its descriptor
        self._parts: dict[Hashable, Claim] = {}  # by their part, the oldest first
        self._lock, self._depth = threading.RLock(), 0
        self._is_locked = False  # for other processes, too
        self._has_warned = False

    @contextlib.contextmanager
    def locked(self, patience: float | None = None) -> Iterator[None]:
        """Keep other processes from claiming during this ``with`` block, which may be nested. The body runs in any
        case: without the lock after ``patience`` seconds (None: the default), nothing is read or claimed in it."""
        with self._lock, contextlib.ExitStack() as stack:
            if self._depth == 0:
                seconds = _PATIENCE if patience is None else patience
                self._is_locked = self._try(lambda: stack.enter_context(_locked(self._folder, seconds)))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def others(self, patience: float | None = None) -> Others:
        """Return the bytes that the other processes of this user hold and will take, or zeros if they cannot be read
        within ``patience`` seconds."""
        with self.locked(patience):
            claims: list[Claim] = []
            if self._is_locked:
                self._try(lambda: claims.extend(self._read()))
            return sum_up(claims, self.group)

    def claim(self, part: Hashable, *, held: int, load: int, growth: int = 0) -> None:
        """Publish the bytes that a part of this process will take (``Claim``), in place of its earlier claim.
        ``held``: the bytes of the whole process. Without the lock, the others' claims were not read either, so
        ``growth`` could include their bytes and is not announced."""
        with self.locked():
            growth = max(0, growth) if self._is_locked else 0
            self._parts = dict(zip(self._parts, settled([*self._parts.values()], held), strict=True))
            self._parts.pop(part, None)
            self._parts[part] = Claim(self.group, max(0, held), max(0, load), growth)
            self._write(held)

    def refresh(self, held: int) -> None:
        """Record that this process now holds ``held`` bytes: the bytes taken since a claim are not to come any more."""
        with self._lock:
            self._write(held)

    def drop(self, part: Hashable, *, held: int) -> None:
        """Withdraw the claim of a part, if it has one."""
        with self.locked():
            if self._parts.pop(part, None) is None:
                return
            if self._parts:
                self._write(held)
            else:
                self._remove_own()

    def _write(self, held: int) -> None:
        if self._own is None and self._parts and self._is_locked:
            self._try(self._create_own)
        if self._own is not None:
            data, (_, descriptor) = CLAIM.dump_json(merged([*self._parts.values()], held)).ljust(_SIZE), self._own
            self._try(lambda: os.pwrite(descriptor, data, 0))

    def _create_own(self) -> None:
        self._own = _create(self._folder / f"{os.getpid()}-{secrets.token_hex(4)}")

    def _remove_own(self) -> None:
        if self._own is not None:
            path, descriptor = self._own
            self._own = None
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def _read(self) -> Iterator[Claim]:
        own = None if self._own is None else self._own[0].name
        for entry in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if entry.name not in ("lock", own) and (claim := _read_living(entry)) is not None:
                yield claim

    def _try(self, act: Callable[[], object]) -> bool:
        """Call ``act``. Return whether it succeeded; log the first failure."""
        try:
            act()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                reason = error.strerror or error
                log.warning("memory is counted as if no other splitinfer ran on this machine: %s", reason)
            return False
        return True


@contextlib.contextmanager
def _locked(folder: Path, patience: float) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up = time.monotonic() + patience
        while not _can_lock(descriptor):
            if time.monotonic() > give_up:
                raise TimeoutError(f"another process has held {folder / 'lock'} for more than {patience:g} s")
            time.sleep(0.002)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone does not, if something holds a duplicate
        os.close(descriptor)


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _create(path: Path) -> tuple[Path, int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return path, descriptor


def _read_living(path: Path) -> Claim | None:
    """Return the claim of a live process. Remove the claim of a dead one and return None."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if _can_lock(descriptor):
            path.unlink(missing_ok=True)
            return None
        return CLAIM.validate_json(os.pread(descriptor, _SIZE, 0), strict=True)
    except (OSError, ValueError) as error:
        log.info("%s is ignored: %s", path, error)
        return None
    finally:
        os.close(descriptor)


# -- this process -----------------------------------------------------------------------------

_ledgers: dict[Path, Ledger] = {}
_group: int | None = None


def join_group(leader: int) -> None:
    """Add this process to the group of ``leader``, which started it and divides memory. Call before any claim."""
    global _group
    _group = leader


def of_this_process() -> Ledger:
    """Return the ledger of this user and machine."""
    folder = of_this_host("memory")
    return _ledgers.setdefault(folder, Ledger(folder, os.getpid() if _group is None else _group))
