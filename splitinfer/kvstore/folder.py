"""The files themselves: found, read, written, removed. Every error of the disk is an ``OSError``; nothing is kept open.

    kv folder / group / block files, about.json

A *group* is one model in one arithmetic: blocks of different groups are never of use to each other. A file is written
under a temporary name and renamed, so that nobody meets half of one; it is not forced to the disk at once, because
a machine that loses power may lose it, and the checksum tells.
"""

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from splitinfer.kvstore.record import Buffer, Damaged, Record, header_bytes, pack, read_header, unpack
from splitinfer.kvstore.shelf import FileName, KeptFile, parse

ABOUT = "about.json"
_STALE = 600.0  # seconds after which a temporary file belongs to nobody any more
_TEMPORARY = ".tmp"
_BEGIN = 12  # bytes that tell how long a header is
_names = itertools.count()


class Folder:
    """The folder of all groups; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def groups(self) -> list[str]:
        """The groups that have a folder."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
        return []

    def files(self, group: str) -> list[KeptFile]:
        """A group's blocks; none where the folder cannot be read."""
        found = ((entry, parse(entry.name)) for entry in self._entries(group))
        return [
            KeptFile(group, name, stat.st_size, stat.st_mtime)
            for entry, name in found
            if name is not None and (stat := _stat(entry)) is not None
        ]

    def all_files(self) -> list[KeptFile]:
        """The blocks of all groups."""
        return [file for group in self.groups() for file in self.files(group)]

    def read(self, group: str, name: FileName) -> tuple[Record, list[memoryview]]:
        """A block's header and arrays. It counts as used now.

        Raises:
            OSError: it is not there, or cannot be read.
            Damaged: it is not what its name says.
        """
        path = self._path(group, name)
        with path.open("rb", buffering=0) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            view = memoryview(data)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise Damaged("it became shorter while it was read")
                view = view[count:]
        record, buffers = unpack(data, name.key)
        if (record.start, record.end) != (name.start, name.end):
            raise Damaged("it holds other positions than its name says")
        return record, buffers

    def header(self, group: str, name: FileName) -> Record:
        """A block's header alone.

        Raises:
            OSError, Damaged: as ``read``.
        """
        with self._path(group, name).open("rb") as file:
            begin = file.read(_BEGIN)
            return read_header(begin + file.read(header_bytes(begin) - len(begin)), name.key)

    def write(self, group: str, name: FileName, record: Record, buffers: Iterable[Buffer]) -> int:
        """Write a block; the bytes that took.

        Raises:
            OSError: the disk is full, or cannot be written to.
        """
        folder = self.path / group
        folder.mkdir(parents=True, exist_ok=True)
        with _renamed(folder, str(name)) as path, path.open("xb", buffering=0) as file:
            return sum(_write_all(file, memoryview(piece)) for piece in pack(record, buffers))

    def describe(self, group: str, about: dict[str, Any]) -> None:
        """Say for people what a group is. Raises OSError."""
        folder = self.path / group
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ABOUT).exists():
            with _renamed(folder, ABOUT) as path:
                path.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def about(self, group: str) -> dict[str, Any]:
        """What ``describe`` said; empty where nobody has."""
        with contextlib.suppress(OSError, ValueError):
            about = json.loads((self.path / group / ABOUT).read_text(encoding="utf-8"))
            return about if isinstance(about, dict) else {}
        return {}

    def touch(self, group: str, name: FileName) -> None:
        """A block was used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(group, name))

    def remove(self, group: str, name: FileName) -> None:
        """Remove a block; that it is gone already is no error."""
        with contextlib.suppress(OSError):
            self._path(group, name).unlink()

    def remove_group(self, group: str) -> None:
        """Remove a group and what is in its folder."""
        shutil.rmtree(self.path / group, ignore_errors=True)

    def sweep(self, stale: float = _STALE) -> int:
        """Remove what writers that died have left, once it is ``stale`` seconds old; how many files."""
        count = 0
        for group in self.groups():
            for entry in self._entries(group):
                stat = _stat(entry) if entry.name.endswith(_TEMPORARY) else None
                if stat is not None and time.time() - stat.st_mtime >= stale:
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()
                        count += 1
        return count

    def free_bytes(self) -> int:
        """Free on its disk. Raises OSError."""
        return shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free

    def _path(self, group: str, name: FileName) -> Path:
        return self.path / group / str(name)

    def _entries(self, group: str) -> Iterator["os.DirEntry[str]"]:
        with contextlib.suppress(OSError), os.scandir(self.path / group) as entries:
            yield from entries


@contextlib.contextmanager
def _renamed(folder: Path, name: str) -> Iterator[Path]:
    """A temporary path that becomes ``name`` if all goes well, and nothing if not."""
    path = folder / f".{name}.{os.getpid()}-{next(_names)}{_TEMPORARY}"
    try:
        yield path
        path.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _write_all(file: Any, view: memoryview) -> int:
    left = view = view.cast("B") if view.nbytes else view
    while left.nbytes:
        left = left[file.write(left) :]
    return view.nbytes


def _stat(entry: "os.DirEntry[str]") -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return entry.stat(follow_symlinks=False)
    return None
