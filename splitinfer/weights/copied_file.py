"""One partly copied file of weights, which survives restarts.

    weights/model.safetensors           header, and the tensors at the sender's places; holes where nothing was copied
    weights/model.safetensors.ranges    the journal: one record for each range that is here

A record is a range (begin, end) of the data part. It is written after the range's bytes were forced to the disk, so a
recorded range survives a power failure. Bytes that a killed process wrote after its last record are asked for again.

A file with holes takes room on the disk only for the bytes written to it (ext4, XFS, APFS).
"""

import contextlib
import errno
import json
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from splitinfer.common.tensor_info import TensorInfo, header_entry
from splitinfer.errors import ModelError
from splitinfer.places import replace_file
from splitinfer.weights.ranges import Span, merged

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD = struct.Struct("<QQ4x")
_RANGES = ".ranges"
_ALIGN = 8  # bytes; the data part begins at a multiple of this


class CopiedFile:
    """Writes ranges into the copy of a file with these tensors. Only one process at a time may do so.

    ``here``: the spans that were here when it was opened, merged.

    Raises (all methods):
        ModelError: the disk is full or cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo]) -> None:
        self._path, header, nbytes = path, header_of(tensors), size_of(tensors)
        self._data_begin = len(header)
        with said(path.parent), contextlib.ExitStack() as stack:
            self._file = _open(path)
            stack.callback(os.close, self._file)
            if os.pread(self._file, len(header), 0) != header or os.fstat(self._file).st_size != nbytes:
                _journal(path).unlink(missing_ok=True)
                os.ftruncate(self._file, nbytes)
                write_all(self._file, header, 0)
            self._journal = _open(_journal(path))
            stack.pop_all()
        self.here = copied(path, tensors)
        records = os.fstat(self._journal).st_size // _RECORD.size
        self._journal_end = records * _RECORD.size  # a half record after it is overwritten
        self._written: list[Span] = []  # and not yet in the journal
        self._is_open = True

    def write(self, begin: int, data: bytes | memoryview) -> None:
        """Write bytes of the data part."""
        with said(self._path.parent):
            write_all(self._file, data, self._data_begin + begin)
        self._written.append((begin, begin + memoryview(data).nbytes))

    def sync(self) -> None:
        """Write all bytes through to the disk, and record them in the journal. This takes long; another thread than the
        one of ``write`` may call it."""
        count = len(self._written)
        records = b"".join(_RECORD.pack(*span) for span in merged(self._written[:count]))
        with said(self._path.parent):
            os.fsync(self._file)
            write_all(self._journal, records, self._journal_end)
            os.fsync(self._journal)
        self._journal_end += len(records)
        del self._written[:count]

    def finish(self) -> None:
        """Write everything through to the disk and close the file."""
        self.sync()
        with said(self._path.parent):
            sync_folder(self._path.parent)
        self.close()

    def close(self) -> None:
        """Close the file unfinished; record the written bytes if the disk allows. The next writer continues from it."""
        if self._is_open:
            self._is_open = False
            if self._written:
                with contextlib.suppress(ModelError):
                    self.sync()
            os.close(self._file)
            os.close(self._journal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copied(path: Path, tensors: Sequence[TensorInfo]) -> tuple[Span, ...]:
    """Return the spans that the copy of a file with these tensors already holds, merged."""
    nbytes = size_of(tensors)
    try:
        if path.is_symlink() or path.stat().st_size != nbytes:
            return ()
        with os.fdopen(os.open(_journal(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as journal:
            data = journal.read()
    except OSError:
        return ()
    records = _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])
    return merged((begin, end) for begin, end in records if end <= nbytes)


def header_of(tensors: Sequence[TensorInfo]) -> bytes:
    """Return the beginning of a safetensors file with these tensors: the header's length (8 bytes, little-endian) and
    JSON (huggingface/safetensors, README, "Format")."""
    text = json.dumps({info.name: header_entry(info, info.begin) for info in tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def size_of(tensors: Sequence[TensorInfo]) -> int:
    """Return the size in bytes of a safetensors file with these tensors."""
    return len(header_of(tensors)) + max((info.end for info in tensors), default=0)


def _journal(path: Path) -> Path:
    return path.with_name(path.name + _RANGES)


def write_whole(folder: Path, name: str, data: bytes) -> None:
    """Write a small file under its name, whole or not at all. ``name`` must have been checked (``weights.manifest``).

    Raises:
        ModelError: the disk is full or cannot be written.
    """
    with said(folder):
        replace_file(folder / name, data)
        sync_folder(folder)


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    left = memoryview(data)
    while left.nbytes:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def said(folder: Path) -> Iterator[None]:
    """Turn a disk error into a ModelError whose text is a sentence."""
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
                f"{error.filename or folder} is a symbolic link, which splitinfer does not follow here; remove it"
            ) from error
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error


def _open(path: Path) -> int:
    """Open a regular file of the store for writing, without following a link."""
    file = os.open(path, _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ModelError(f"{path} is not a file; remove it")
    return file
