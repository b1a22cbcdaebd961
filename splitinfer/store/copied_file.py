"""One file of weights that was copied in part, across restarts.

    weights/model.safetensors           header, and the tensors at the sender's places; holes where nothing was copied
    weights/model.safetensors.ranges    the journal: one record for each range that was written

A record is a range (begin, end) of the data part and the checksum of its bytes. A record with end 0 says that the first
``begin`` records were forced to the disk. Those are believed: only they count as being here. After a restart the bytes
of all others are read and compared with their checksums, because a power failure may have lost any of them.

A file with holes takes the disk's room for what was written to it (ext4, XFS, APFS).
"""

import contextlib
import errno
import json
import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from splitinfer.core.tensor_info import TensorInfo, header_entry
from splitinfer.errors import ModelError
from splitinfer.store.ranges import Span, checksum, merged

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD = struct.Struct("<QQI")
_RANGES = ".ranges"
_ALIGN = 8  # the data part begins at a multiple of so many bytes


class _Record(NamedTuple):
    begin: int
    end: int
    check: int


class CopiedFile:
    """Writes ranges into the copy of a file with these tensors. One process at a time does.

    ``here``: what is here already, merged.

    Raises (all methods):
        ModelError: the disk is full, or it cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo]) -> None:
        self._path, header = path, header_of(tensors)
        self._data_begin, self._nbytes = len(header), size_of(tensors)
        with said(path.parent), contextlib.ExitStack() as stack:
            self._file = _open(path)
            stack.callback(os.close, self._file)
            if os.pread(self._file, len(header), 0) != header or os.fstat(self._file).st_size != self._nbytes:
                _journal(path).unlink(missing_ok=True)
                os.ftruncate(self._file, self._nbytes)
                write_all(self._file, header, 0)
            synced, others = _read(path)
            found = [record for record in others if self._is_there(record)]
            self.here = merged([*synced, *((record.begin, record.end) for record in found)])
            # Without records that are wrong or half written, since the next are counted from the beginning.
            records = [*(_Record(*span, 0) for span in synced), _Record(len(synced), 0, 0), *found]
            write_whole(path.parent, _journal(path).name, b"".join(_RECORD.pack(*record) for record in records))
            self._num_records = len(records)
            self._journal = _open(_journal(path))
            stack.pop_all()
        self._is_open = True

    def _is_there(self, record: _Record) -> bool:
        if self._data_begin + record.end > self._nbytes:
            return False
        data = os.pread(self._file, record.end - record.begin, self._data_begin + record.begin)
        return len(data) == record.end - record.begin and checksum(data) == record.check

    def write(self, begin: int, data: bytes | memoryview, check: int) -> None:
        """Write bytes of the data part that have this checksum: the caller has compared it."""
        with said(self._path.parent):
            write_all(self._file, data, self._data_begin + begin)
            self._record(self.next_record(), _Record(begin, begin + memoryview(data).nbytes, check))

    def next_record(self) -> int:
        """The number of the next record, for which room is left."""
        self._num_records += 1
        return self._num_records - 1

    def sync(self, number: int) -> None:
        """Force what the records before ``number`` describe to the disk, and say so in that record. It takes long, and
        may be called on another thread than ``write``."""
        with said(self._path.parent):
            os.fsync(self._file)
            self._record(number, _Record(number, 0, 0))
            os.fsync(self._journal)

    def finish(self) -> None:
        """Force all to the disk, and close the file."""
        self.sync(self.next_record())
        with said(self._path.parent):
            sync_folder(self._path.parent)
        self.close()

    def _record(self, number: int, record: _Record) -> None:
        write_all(self._journal, _RECORD.pack(*record), _RECORD.size * number)

    def close(self) -> None:
        """Leave it as it is; the next writer goes on."""
        if self._is_open:
            self._is_open = False
            os.close(self._file)
            os.close(self._journal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copied(path: Path, tensors: Sequence[TensorInfo], *, unfinished: bool = False) -> tuple[Span, ...]:
    """What is here of the copy of a file with these tensors, merged. ``unfinished``: also what an interrupted copy has
    written."""
    try:
        if path.is_symlink() or path.stat().st_size != size_of(tensors):
            return ()
        synced, others = _read(path)
    except OSError:
        return ()
    return merged([*synced, *((record.begin, record.end) for record in others if unfinished)])


def header_of(tensors: Sequence[TensorInfo]) -> bytes:
    """The beginning of a safetensors file with these tensors: the header's length (8 bytes, little-endian) and JSON
    (huggingface/safetensors, README, "Format")."""
    text = json.dumps({info.name: header_entry(info, info.begin) for info in tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def size_of(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of a safetensors file with these tensors."""
    return len(header_of(tensors)) + max((info.end for info in tensors), default=0)


def _journal(path: Path) -> Path:
    return path.with_name(path.name + _RANGES)


def _read(path: Path) -> tuple[tuple[Span, ...], list[_Record]]:
    """What a journal says was forced to the disk, merged; and the other records."""
    try:
        file = os.open(_journal(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return (), []
    with os.fdopen(file, "rb") as journal:
        data = journal.read()
    records = [_Record(*each) for each in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])]
    synced = max((record.begin for record in records if not record.end), default=0)
    spans = ((record.begin, record.end) for record in records[:synced])
    return merged(spans), [record for record in records[synced:] if record.begin < record.end]


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """Write a small file under its name, whole or not at all. ``name`` must have been checked (``store.manifest``).

    Raises:
        ModelError: the disk is full, or it cannot be written.
    """
    with said(folder):
        # A name of its own: another process may write the same file just now.
        file, hidden = tempfile.mkstemp(".partial", f".{name}.", folder)
        try:
            write_all(file, data, 0)
            os.fsync(file)
            Path(hidden).replace(folder / name)
        except BaseException:
            Path(hidden).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        sync_folder(folder)


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
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
                f"the disk of {folder.parent} is full; what was copied stays there, and the next try continues from it "
                "(`splitinfer models rm` makes room)"
            ) from error
        if error.errno == errno.ELOOP:
            raise ModelError(
                f"{error.filename or folder} is a symbolic link, and splitinfer follows none here; remove it"
            ) from error
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error


def _open(path: Path) -> int:
    """Open a regular file of the store for writing; a link there is not followed."""
    file = os.open(path, _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ModelError(f"{path} is not a file; remove it")
    return file
