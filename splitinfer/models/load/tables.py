"""Leaves large tables on disk if a step only looks up the rows of its tokens: Engram, n-grams, per-layer embeddings.

Rows are read while a step's graph is built, from a mapped file. The operating system is told all rows first, so that it
reads them in parallel. MLX's graph shows which tables can stay on disk: only gathers read them, and the gathered
indices depend on no parameter.
"""

import logging
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from splitinfer.models.folder.checkpoint import Checkpoint, data_begin, read_header
from splitinfer.models.library.graph import Graph
from splitinfer.models.library.layers import StandIn, nbytes
from splitinfer.models.load.building import dtype_of

log = logging.getLogger(__name__)

LARGE = 8 * 2**30
"""The least bytes of a table that stays on disk. For a smaller one the memory saved is not worth the time of its
reads."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A parameter of a table. ``tensor``: the stored tensor that it is made from. ``is_view``: its bytes are the
    tensor's with another dtype; otherwise the numbers are cast."""

    name: str
    tensor: str
    is_view: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A module that only looks up rows. ``path``: the module's name within the model."""

    path: str
    columns: tuple[TableColumn, ...]
    nbytes: int

    @property
    def parameters(self) -> set[str]:
        """The names of its parameters within the model."""
        return {f"{self.path}.{column.name}" for column in self.columns}


def find_tables(
    model: nn.Module, outputs: Sequence[mx.array], parameters: Mapping[str, mx.array], stored: Mapping[str, mx.array]
) -> tuple[Table, ...]:
    """Return the large tables that ``outputs`` only look up rows of. ``stored``: placeholders of all stored tensors."""
    found = list[Table]()
    for path, module in _only_looked_up(model, outputs, parameters):
        names = [name for name, _ in tree_flatten(module.parameters())]
        columns = [_column(name, parameters[f"{path}.{name}"], stored) for name in names]
        if None in columns:
            log.info("%s stays in memory (%d bytes): no stored tensor has its rows unchanged", path, nbytes(module))
        else:
            found.append(Table(path, tuple(filter(None, columns)), nbytes(module)))
    return tuple(found)


def _only_looked_up(
    model: nn.Module, outputs: Sequence[mx.array], parameters: Mapping[str, mx.array]
) -> list[tuple[str, nn.Module]]:
    """Return the large tables that ``outputs`` read only by looking up rows of them or of parts of the same table."""
    large = list(_large(model))
    if not large:
        return []
    graph, readers, unread = Graph(outputs, parameters), defaultdict[str, set[str]](set), set[str]()
    read = graph.read_by(range(len(outputs)))
    for path, module in large:
        for name, _ in tree_flatten(module.parameters()):
            whole = f"{path}.{name}"
            readers[_family(path)] |= graph.readers(whole) - {"StopGradient"}  # which makes a parameter a result
            readers[_family(path)] |= graph.mixed_with(whole) & set(parameters)
            unread |= set() if whole in read else {path}
    return [(path, module) for path, module in large if path not in unread and readers[_family(path)] == {"Gather"}]


def leave_on_disk(model: nn.Module, tables: Sequence[Table], read: Collection[str], checkpoint: Checkpoint) -> None:
    """Replace the model's tables by modules that read rows from the files. Replace large tables without a parameter in
    ``read`` (they belong to another stage's layers) by modules that read nothing."""
    for table in tables:
        module = dict(model.named_modules())[table.path]
        files = {c.name: _File(checkpoint, c, module[c.name]) for c in table.columns}
        put(model, table.path, _OnDisk(module, files))
    there = {table.path for table in tables} | {name.rpartition(".")[0] for name in read}
    for path, module in list(_large(model)):
        if path not in there:
            put(model, path, _OnDisk(module, {}))


def leave_out(model: nn.Module, outputs: Callable[[], Sequence[mx.array]]) -> None:
    """Replace the large tables that the whole model's ``outputs`` only look up rows of by modules that read nothing."""
    if dict(_large(model)):
        for path, module in _only_looked_up(model, outputs(), dict(tree_flatten(model.parameters()))):
            put(model, path, _OnDisk(module, {}))


def put(model: nn.Module, path: str, module: Any) -> None:
    """Put a module at a path within the model."""
    above, _, key = path.rpartition(".")
    holder: Any = model
    for part in filter(None, above.split(".")):
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    holder[int(key) if isinstance(holder, list) else key] = module


def _modules_of_rows(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the embeddings of a model: modules that hold only arrays with the same number of rows."""
    for path, module in model.named_modules():
        arrays = [array for _, array in tree_flatten(module.parameters())]
        rows = {array.shape[0] if array.ndim else 0 for array in arrays}
        if path and "Embedding" in type(module).__name__ and not module.children() and len(rows) == 1:
            yield path, module


def _large(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the large embeddings: large by themselves, or together with the other parts of their table."""
    found, sizes = dict(_modules_of_rows(model)), Counter[str]()
    for path, module in found.items():
        sizes[_family(path)] += nbytes(module)
    return ((path, module) for path, module in found.items() if sizes[_family(path)] >= LARGE)


def _family(path: str) -> str:
    """Return the path of the list that a module is in, or of the module itself if it is in no list."""
    above, _, key = path.rpartition(".")
    return above if key.isdigit() else path


def _column(name: str, parameter: mx.array, stored: Mapping[str, mx.array]) -> TableColumn | None:
    """Return how a parameter is stored. Return None if it is not one tensor that is unchanged, viewed or cast."""
    ((tensors, made),) = Graph([parameter], stored).origins()
    if len(tensors) != 1 or not made <= {"View", "AsType"} or len(made) > 1:
        return None
    return TableColumn(name, tensors[0], "View" in made) if stored[tensors[0]].shape[0] == parameter.shape[0] else None


class _File:
    """One tensor in a file, as rows of bytes."""

    def __init__(self, checkpoint: Checkpoint, column: TableColumn, like: mx.array) -> None:
        path = checkpoint.path_of(column.tensor)
        info = next(info for info in read_header(path) if info.name == column.tensor)
        self._shape, self._dtype = like.shape[1:], like.dtype
        self._stored_dtype = like.dtype if column.is_view else dtype_of(info)
        begin, rows = data_begin(path) + info.begin, info.shape[0]
        self._bytes = np.memmap(path, np.uint8, "r", begin, (rows, info.nbytes // rows))
        self._bytes._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        self._skipped = begin % mmap.ALLOCATIONGRANULARITY  # bytes of the mapping before the first row

    def rows(self, wanted: np.ndarray) -> mx.array:
        """Return the ``wanted`` rows (ascending) as the parameter would hold them."""
        table, page = self._bytes, mmap.PAGESIZE
        first = (wanted * table.shape[1] + self._skipped) // page
        last = ((wanted + 1) * table.shape[1] + self._skipped - 1) // page
        for start, end in _ranges(first, last):
            table._mmap.madvise(mmap.MADV_WILLNEED, start * page, (end - start + 1) * page)  # type: ignore[attr-defined]
        found = mx.array(table[wanted]).view(self._stored_dtype)
        return found.reshape(len(wanted), *self._shape).astype(self._dtype)


def _ranges(first: np.ndarray, last: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges of pages; adjacent ranges are joined."""
    breaks = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
    for few in np.split(np.stack([first, last], axis=1), breaks):
        yield int(few[0, 0]), int(few[-1, 1])


class _OnDisk(StandIn):
    """Stands for a table: looks up rows in files and runs the real module on these. Without files the rows are
    zeros."""

    def __init__(self, real: nn.Module, files: Mapping[str, _File]) -> None:
        super().__init__(real)
        self._files = files
        # They have the right form and are never computed.
        self._zeros = {name: mx.zeros(a.shape, a.dtype) for name, a in tree_flatten(real.parameters())}
        self.weight = self._zeros.get("weight")
        for name in self._zeros:
            real.pop(name)

    def __call__(self, ids: Any) -> Any:
        rows, places = self._zeros, mx.zeros(ids.shape, mx.int32)
        if self._files:
            wanted, found = np.unique(np.asarray(ids), return_inverse=True)
            rows = {name: file.rows(wanted) for name, file in self._files.items()}
            places = mx.array(found.reshape(ids.shape).astype(np.int32))
        return called_with(rows, self._real, places)


def called_with(arrays: Mapping[str, mx.array], module: nn.Module, *args: Any, **named: Any) -> Any:
    """Call a module that has ``arrays`` as parameters only during the call, and return its result."""
    try:
        for name, array in arrays.items():
            module[name] = array
        return module(*args, **named)
    finally:
        for name in arrays:
            module.pop(name, None)
