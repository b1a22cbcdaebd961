"""One file of the store that is being written, piece by piece, across restarts.

    .part-x.safetensors.partial    header and pieces, in any order
    .part-x.safetensors.checks     8 bytes for each piece: its checksum and a 1 once it was written, else zeros

Nothing is believed after a restart: what the checksums say is there is read and compared, because a power failure may
have lost any of it. A complete part is forced to the disk before it gets its name.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from splitinfer.errors import ModelError
from splitinfer.store.parts import Part, Slot
from splitinfer.store.pieces import Piece, check_of

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD = struct.Struct("<II")  # of a piece: its checksum, and 1
PARTIAL, CHECKS = ".partial", ".checks"


class PartWriter:
    """Writes ``part`` into ``folder``. One process at a time does.

    Raises (all methods):
        ModelError: another process writes it, the disk is full, or it cannot be written.
    """

    def __init__(self, folder: Path, part: Part) -> None:
        self._folder, self._part = folder, part
        with said(folder):
            self._file = _open(folder / f".{part.name}{PARTIAL}")
            try:
                self._checks_file = _open(folder / f".{part.name}{CHECKS}")
            except BaseException:
                os.close(self._file)
                raise
        self._is_open = True
        try:
            self._is_here = self._resume()
        except BaseException:
            self.close()
            raise

    def _resume(self) -> list[bool]:
        """Which pieces are here."""
        with said(self._folder):
            _lock(self._file, self._folder / f".{self._part.name}{PARTIAL}")
            kept = os.pread(self._checks_file, _RECORD.size * self._part.num_pieces, 0)
            if os.pread(self._file, len(self._part.header), 0) != self._part.header:
                kept = b""
                _write(self._file, self._part.header, 0)
            return [self._kept(piece, slot, kept[_RECORD.size * slot.index :]) for piece, slot in self._part.pieces()]

    def _kept(self, piece: Piece, slot: Slot, kept: bytes) -> bool:
        """Whether a piece is here, whose record ``kept`` begins with."""
        if len(kept) < _RECORD.size:
            return False
        check, was_written = _RECORD.unpack_from(kept)
        return bool(was_written == 1 and check_of(os.pread(self._file, piece.nbytes, slot.offset)) == check)

    def missing(self) -> list[tuple[Piece, Slot]]:
        """The pieces that are not here yet, and where they go."""
        return [each for each in self._part.pieces() if not self._is_here[each[1].index]]

    def write(self, slot: Slot, data: bytes | memoryview, check: int) -> None:
        """Write a piece whose bytes have this checksum: the caller has compared it."""
        with said(self._folder):
            _write(self._file, data, slot.offset)
            _write(self._checks_file, _RECORD.pack(check, 1), _RECORD.size * slot.index)
        self._is_here[slot.index] = True

    def finish(self) -> Path:
        """Give the complete part its name; return its path."""
        assert not self.missing()
        final = self._folder / self._part.name
        with said(self._folder):
            os.ftruncate(self._file, self._part.nbytes)
            for file in (self._file, self._checks_file):
                os.fsync(file)
            (self._folder / f".{self._part.name}{CHECKS}").replace(f"{final}{CHECKS}")
            (self._folder / f".{self._part.name}{PARTIAL}").replace(final)
            sync_folder(self._folder)
        self.close()
        return final

    def close(self) -> None:
        """Leave it as it is; the next writer goes on."""
        if self._is_open:
            self._is_open = False
            os.close(self._file)
            os.close(self._checks_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """Write a small file under its name, whole or not at all. ``name`` must have been checked (``store.names``).

    Raises:
        ModelError: the disk is full, or it cannot be written.
    """
    with said(folder):
        # A name of its own: another process may write the same file just now.
        file, hidden = tempfile.mkstemp(PARTIAL, f".{name}.", folder)
        try:
            _write(file, data, 0)
            os.fsync(file)
            Path(hidden).replace(folder / name)
        except BaseException:
            Path(hidden).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        sync_folder(folder)


def is_busy(partial: Path) -> bool:
    """Whether a process writes this unfinished part."""
    try:
        file = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _open(path: Path) -> int:
    """Open a regular file of the store for writing; a link there is not followed."""
    file = os.open(path, _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ModelError(f"{path} is no file; remove it")
    return file


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same = path.exists() and path.stat().st_ino == os.fstat(file).st_ino  # else it was finished meanwhile
    except BlockingIOError:
        is_same = False
    if not is_same:
        raise ModelError(
            f"another process of this machine is copying the same weights to {path.parent}; try again when it is done"
        )


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left.nbytes:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Force names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def said(folder: Path) -> Iterator[None]:
    """Let an error of the disk be a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk of {folder.parent} is full; what was copied stays there, and the next try goes on from it "
                "(`splitinfer models rm` makes room)"
            ) from error
        if error.errno == errno.ELOOP:
            raise ModelError(f"{error.filename or folder} is a link, which is not followed; remove it") from error
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error
