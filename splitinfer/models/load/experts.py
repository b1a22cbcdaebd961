"""Finds the stacked experts of a model that can stay on disk, and the bytes of each expert in the files.

A module qualifies if its call takes ``indices`` and MLX's graph shows that a gathered product reads its parameters
[experts, out, in]. Most parameters are a stored tensor unchanged, viewed or cast, or a stack of one tensor for each
expert. The model's own ``sanitize`` may move numbers as well: halves of a fused tensor, every second row. How it moves
them is seen by giving it numbered bytes: one expert in place of all, because experts are treated alike.
"""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.graph import Graph
from splitinfer.models.load.building import placeholders_of, sanitised

log = logging.getLogger(__name__)

_PRODUCTS = {"GatherMM", "GatherQMM", "Transpose"}  # some read the weight transposed
_UNCHANGED = {"View", "AsType"}
_STACKED = {"ExpandDims", "Concatenate", *_UNCHANGED}
_MOVED = {"Slice", "Split", "Reshape", "Flatten", "Unflatten", "Transpose", "Contiguous", "Squeeze", *_STACKED}


@dataclass(frozen=True, slots=True)
class Column:
    """A parameter [experts, *shape] of a module.

    Attributes:
        tensors: the stored tensor of all experts, or one tensor for each.
        dtype: of the parameter; ``stored``: of the same numbers in the file.
        run, starts: an expert's bytes in memory are runs of ``run`` bytes that begin at ``starts`` among the
            ``whole`` bytes that the file holds of it.
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: mx.Dtype
    stored: mx.Dtype
    whole: int
    run: int
    starts: tuple[int, ...] = (0,)

    @property
    def nbytes(self) -> int:
        """The bytes of one expert in memory."""
        return prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class Experts:
    """A module of stacked experts. ``path``: its name within the model."""

    path: str
    count: int
    columns: tuple[Column, ...]

    @property
    def nbytes_each(self) -> int:
        """The bytes of one expert in memory."""
        return sum(column.nbytes for column in self.columns)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts in memory."""
        return self.count * self.nbytes_each

    @property
    def parameters(self) -> set[str]:
        """The names of its parameters within the model."""
        return {f"{self.path}.{column.name}" for column in self.columns}


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, mx.array]]]:
    """Yield each module that holds stacked experts, with its path and its parameters that have a row per expert."""
    for path, module in model.named_modules():
        arrays = dict(tree_flatten(module.parameters())) if path and not module.children() else {}
        counts = {array.shape[0] for array in arrays.values() if array.ndim == 3}
        if len(counts) == 1 and "indices" in inspect.signature(type(module).__call__).parameters:
            yield path, module, {name: a for name, a in arrays.items() if a.ndim and {a.shape[0]} == counts}


def find_experts(
    checkpoint: Checkpoint,
    model: nn.Module,
    outputs: Sequence[mx.array],
    parameters: Mapping[str, mx.array],
    stored: Mapping[str, mx.array],
    *,
    sees: bool,
) -> tuple[Experts, ...]:
    """Return the stacked experts that ``outputs`` read and that can stay on disk.

    Args:
        outputs: unevaluated results of the stage.
        parameters: the model's parameters by name.
        stored: placeholders of all stored tensors.
        sees: the model takes pictures.
    """
    modules = {path: arrays for path, _, arrays in expert_modules(model)}
    if not modules:
        return ()
    graph = Graph(outputs, parameters)
    read, found = graph.read_by(range(len(outputs))), list[Experts]()
    wanted = {
        f"{path}.{name}": parameters[f"{path}.{name}"]
        for path, arrays in modules.items()
        for name in arrays
        if any(f"{path}.{one}" in read and graph.readers(f"{path}.{one}") & _PRODUCTS for one in arrays)
    }
    made = _Made(checkpoint, wanted, stored, sees=sees)
    for path, arrays in modules.items():
        if f"{path}.{next(iter(arrays))}" in wanted:
            columns = [made.column(f"{path}.{name}", name) for name in arrays]
            if None in columns:
                log.info("%s stays in memory: its experts are not in the files one by one", path)
            else:
                found.append(Experts(path, next(iter(arrays.values())).shape[0], tuple(filter(None, columns))))
    return tuple(found)


class _Made:
    """Finds how parameters are made of stored tensors."""

    def __init__(
        self, checkpoint: Checkpoint, wanted: Mapping[str, mx.array], stored: Mapping[str, mx.array], *, sees: bool
    ) -> None:
        self._checkpoint, self._wanted, self._stored, self._sees = checkpoint, wanted, stored, sees
        origins = Graph([*wanted.values()], stored).origins()
        self._origins = dict(zip(wanted, origins, strict=True))
        self._moves = dict[str, tuple[int, tuple[int, ...]] | None]()  # by the parameter's name without numbers

    def column(self, name: str, own: str) -> Column | None:
        """Return how a parameter is stored, or None if its experts are not in the files one by one. ``own``: its name
        within the module."""
        array, (tensors, operations) = self._wanted[name], self._origins[name]
        if not tensors or not operations <= _MOVED:
            return None
        source, count, shape = self._stored[tensors[0]], array.shape[0], tuple(array.shape[1:])
        whole = source.nbytes if len(tensors) > 1 else source.nbytes // source.shape[0]
        # Only floating-point numbers are cast; a view has the parameter's dtype.
        stored = source.dtype if "AsType" in operations else array.dtype
        size = prod(shape) * stored.size
        column = Column(own, tuple(tensors), shape, array.dtype, stored, whole, size)
        floats = mx.issubdtype(stored, mx.floating) and mx.issubdtype(array.dtype, mx.floating)
        if "AsType" in operations and ("View" in operations or not floats):
            return None
        if len(tensors) > 1:
            alike = all(self._stored[one].shape == source.shape for one in tensors)
            return column if len(tensors) == count and alike and whole == size and operations <= _STACKED else None
        if source.shape[0] != count:
            return None
        if operations <= _UNCHANGED and whole == size:
            return column
        form = re.sub(r"\d+", "#", name)
        if form not in self._moves:
            self._moves[form] = self._moved(name, tensors[0], whole, stored)
        moves = self._moves[form]
        return moves and Column(own, tuple(tensors), shape, array.dtype, stored, whole, *moves)

    def _moved(self, name: str, tensor: str, whole: int, stored: mx.Dtype) -> tuple[int, tuple[int, ...]] | None:
        """Return the runs of bytes that make a parameter of a stored expert of ``whole`` bytes. Return None if it is
        not only moved bytes."""
        source, found = self._stored[tensor], np.zeros(0, np.int64)
        single = {name for name, array in self._stored.items() if array.ndim and array.shape == source.shape}
        for digit in range(4):  # of the byte's number, to the base 256
            coded = mx.array((np.arange(whole) >> 8 * digit & 255).astype(np.uint8)).view(source.dtype)
            given = {one: mx.zeros((1, *source.shape[1:]), source.dtype) for one in single}
            given[tensor] = coded.reshape(1, *source.shape[1:])
            try:
                parameters = sanitised(self._checkpoint, placeholders_of(self._checkpoint) | given, sees=self._sees)
            except ModelError:
                return None
            made = parameters.get(name, parameters.get(f"language_model.{name}"))
            if made is None or made.dtype != stored or made.shape[0] != 1:
                return None
            seen = np.array(mx.contiguous(made).view(mx.uint8)).reshape(-1).astype(np.int64)
            found = seen if digit == 0 else found + (seen << 8 * digit)
        if found.max(initial=0) >= whole:
            return None
        breaks = np.flatnonzero(np.diff(found) != 1) + 1
        run = int(np.gcd.reduce(np.diff([0, *breaks, len(found)])))
        return run, tuple(found[::run].tolist())
