"""Reads single experts from safetensors files: byte ranges, many at once, straight into the memory of MLX's arrays."""

import os
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from splitinfer.errors import DeviceFailed, ModelError
from splitinfer.models.folder.checkpoint import Checkpoint, data_begin, read_header
from splitinfer.models.load.experts import Column
from splitinfer.system.disk import READERS

Bytes = NDArray[np.uint8]

_AS_WORDS: dict[mx.Dtype, Any] = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}


class _File:
    """An open file of weights. ``grows``: it is a copy that other tensors may still be added to."""

    def __init__(self, path: Path, *, grows: bool) -> None:
        self._path, self._grows, self._file = path, grows, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._found = self._state()
        self.begins = {info.name: data_begin(path) + info.begin for info in read_header(path)}

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def read(self, at: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``at`` on. Raise DeviceFailed if they cannot be read, or if the file was
        changed since it was opened."""
        left = memoryview(into)  # type: ignore[arg-type]
        while left:
            try:
                count = os.preadv(self._file, [left], at)
            except OSError as error:
                raise DeviceFailed(f"experts cannot be read from {self._path} ({error.strerror or error})") from error
            if not count:
                raise DeviceFailed(f"experts cannot be read: {self._path} was cut short while the model is in use")
            left, at = left[count:], at + count
        if not self._grows and self._state() != self._found:
            raise DeviceFailed(f"experts cannot be read: {self._path} was changed while the model is in use")


class ExpertFiles:
    """The files of a stage's experts, and the threads that read them.

    Raises:
        ModelError: a file is gone or damaged.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._files = checkpoint, dict[Path, _File]()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="experts")

    def source(self, column: Column) -> "Source":
        """Return what reads the experts of a column."""
        return Source(column, [self._opened(tensor) for tensor in column.tensors])

    def _opened(self, tensor: str) -> _File:
        path = self._checkpoint.path_of(tensor)
        if path not in self._files:
            try:
                self._files[path] = _File(path, grows=tensor in self._checkpoint.copied)
            except OSError as error:
                raise ModelError(f"{path}: the experts cannot be read ({error.strerror or error})") from error
        return self._files[path]

    def close(self) -> None:
        """Let the threads end. Nothing may be read afterwards."""
        self._readers.shutdown(wait=False)

    def start(self, reads: Sequence["Read"]) -> "list[Future[None]]":
        """Start reads, and return at once. The futures, one for each thread, raise DeviceFailed."""
        left = iter(reads)  # each thread takes the next
        return [self._readers.submit(_read, left) for _ in range(min(READERS, len(reads)))]


@dataclass(frozen=True, slots=True)
class Read:
    """One expert's part of a column, and the memory for it."""

    source: "Source"
    expert: int
    into: Bytes


def _read(reads: Iterator[Read]) -> None:
    for one in reads:
        one.source.read(one.expert, one.into)


class Source:
    """Reads the experts of one column."""

    def __init__(self, column: Column, files: list[_File]) -> None:
        self._column, self._files, starts = column, files, np.array(column.starts)
        begins = [file.begins[tensor] for file, tensor in zip(files, column.tensors, strict=True)]
        self._steps = starts - starts.min()
        self._begins = [begin + int(starts.min()) for begin in begins]
        self._size = int(self._steps.max()) + column.run

    def read(self, expert: int, into: Bytes) -> None:
        """Fill ``into`` with an expert's bytes as they are in memory."""
        column, is_one = self._column, len(self._files) == 1
        file = self._files[0 if is_one else expert]
        at = self._begins[0] + expert * column.whole if is_one else self._begins[expert]
        if len(self._steps) == 1 and column.stored == column.dtype:
            file.read(at, into)
            return
        found = np.empty(self._size, np.uint8)
        file.read(at, found)
        if len(self._steps) > 1:
            found = np.lib.stride_tricks.sliding_window_view(found, column.run)[self._steps].reshape(-1)
        into[:] = found if column.stored == column.dtype else _cast(found, column.stored, column.dtype)


def _cast(found: Bytes, stored: mx.Dtype, dtype: mx.Dtype) -> Bytes:
    """Return floating-point numbers, given as bytes, in another dtype, rounded as MLX rounds them."""
    words: NDArray[Any] = found.view(_AS_WORDS[stored])
    is_cut = stored == mx.bfloat16  # the upper half of a float32
    wide = (words.astype(np.uint32) << 16).view(np.float32) if is_cut else words.astype(np.float32)
    if dtype == mx.bfloat16:
        bits = wide.view(np.uint32)
        words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        words = wide.astype(_AS_WORDS[dtype])
    return np.frombuffer(words, np.uint8)
