"""Lists, reads, writes and removes block files. Every disk error is an ``OSError``; no file is kept open.

    kv folder / group / block files, splitinfer.json

A *group* is one model in one arithmetic: blocks of different groups cannot be combined. A file is written under a
temporary name and renamed, so that no process reads half of one. It is not forced to the disk: a power failure may
damage it, which the checksum detects. Files with other names than these are never touched, because the folder may hold
more than KV.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from splitinfer.kvstore.index import FileName, StoredFile, parse
from splitinfer.kvstore.record import Buffer, Damaged, Record, header_bytes, pack, read_header, unpack
from splitinfer.places import caches

ABOUT = "splitinfer.json"
DEFAULT_CAP = 20 * 10**9  # bytes that a machine stores
_STALE = 600.0  # seconds after which a temporary file's writer must have died
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
_BEGIN = 12  # bytes at the beginning that give the header's length
_MAX_BYTES = 2**31  # of a file; blocks are much smaller


def default_folder() -> Path:
    """Return the folder for KV among the user's caches."""
    return caches() / "kv"


class Folder:
    """The folder that holds all groups; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def groups(self) -> list[str]:
        """Return the groups that have a folder, sorted."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
        return []

    def files(self, group: str) -> list[StoredFile]:
        """Return a group's block files, or an empty list if the folder cannot be read."""
        found = ((entry, parse(entry.name)) for entry in self._entries(group))
        return [
            StoredFile(group, name, status.st_size, status.st_mtime)
            for entry, name in found
            if name is not None and (status := _status(entry)) is not None
        ]

    def all_files(self) -> list[StoredFile]:
        """Return the block files of all groups."""
        return [file for group in self.groups() for file in self.files(group)]

    def read(self, group: str, name: FileName) -> tuple[Record, list[memoryview]]:
        """Read a block: its header, and its arrays' bytes.

        Raises:
            OSError: the file is missing or cannot be read.
            Damaged: the content does not match the name.
        """
        record, buffers = unpack(_bytes_of(self._path(group, name)), name.key)
        return _named(record, name), buffers

    def header(self, group: str, name: FileName) -> Record:
        """Read only a block's header. Raises as ``read``."""
        with self._path(group, name).open("rb") as file:
            begin = file.read(_BEGIN)
            return _named(read_header(begin + file.read(header_bytes(begin) - len(begin)), name.key), name)

    def write(self, group: str, name: FileName, record: Record, buffers: Iterable[Buffer]) -> int:
        """Write a block and return the number of bytes written.

        Raises:
            OSError: the disk is full or not writable.
        """
        folder = self.path / group
        _make(folder)
        with _renamed(folder, str(name)) as path, path.open("xb", buffering=0) as file:
            return sum(_write_all(file, memoryview(piece)) for piece in pack(record, buffers))

    def describe(self, group: str, about: dict[str, Any]) -> None:
        """Write a group's description for people, unless it has one. Raises OSError."""
        folder = self.path / group
        _make(folder)
        if not (folder / ABOUT).exists():
            with _renamed(folder, ABOUT) as path:
                path.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def about(self, group: str) -> dict[str, Any]:
        """Return the group's description; empty if it has none."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            about = json.loads((self.path / group / ABOUT).read_text(encoding="utf-8"))
            return about if isinstance(about, dict) else {}
        return {}

    def touch(self, group: str, name: FileName) -> None:
        """Mark a block as used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(group, name))

    def remove(self, group: str, name: FileName) -> None:
        """Remove a block's file, if it exists."""
        with contextlib.suppress(OSError):
            self._path(group, name).unlink()

    def remove_group(self, group: str) -> None:
        """Remove a group's files, and then its folder if it is empty."""
        with contextlib.suppress(OSError):
            for entry in list(self._entries(group)):
                if _is_ours(entry.name):
                    Path(entry.path).unlink(missing_ok=True)
            (self.path / group).rmdir()

    def sweep(self, stale: float = _STALE) -> tuple[int, int]:
        """Remove temporary files older than ``stale`` seconds, whose writers died. Return the files and bytes."""
        count = nbytes = 0
        for group in self.groups():
            for entry in self._entries(group):
                status = _status(entry) if _is_temporary(entry.name) else None
                if status is not None and time.time() - status.st_mtime >= stale:
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()
                        count, nbytes = count + 1, nbytes + status.st_size
        return count, nbytes

    def free_bytes(self) -> int:
        """Free bytes on the folder's disk. Raises OSError."""
        return shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free

    def _path(self, group: str, name: FileName) -> Path:
        return self.path / group / str(name)

    def _entries(self, group: str) -> Iterator["os.DirEntry[str]"]:
        with contextlib.suppress(OSError), os.scandir(self.path / group) as entries:
            yield from entries


def _make(folder: Path) -> None:
    """Make a folder that other users of the machine cannot read: its files reveal the prompts."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _renamed(folder: Path, name: str) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``name`` on success and remove it on an error."""
    path = folder / f".{name}.{secrets.token_hex(8)}.tmp"  # random, because process ids recur
    try:
        yield path
        path.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _bytes_of(path: Path) -> bytes:
    """Return a block file's bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_BYTES:
            raise Damaged(f"it has {size:,} bytes")
        return file.read(size)


def _write_all(file: Any, view: memoryview) -> int:
    left = view = view.cast("B") if view.nbytes else view
    while left.nbytes:
        left = left[file.write(left) :]
    return view.nbytes


def _named(record: Record, name: FileName) -> Record:
    if (record.parent, record.start, record.end) != (name.parent, name.start, name.end):
        raise Damaged("it contains other positions than its name says")
    return record


def _is_ours(name: str) -> bool:
    return name == ABOUT or parse(name) is not None or _is_temporary(name)


def _is_temporary(name: str) -> bool:
    match = _TEMPORARY.fullmatch(name)
    return match is not None and (match[1] == ABOUT or parse(match[1]) is not None)


def _status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Return the status of a regular file. Return None for anything else, which is neither read nor removed."""
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return status if stat.S_ISREG(status.st_mode) else None
    return None
