"""Finds a model's layers, replaces them temporarily, and walks their arguments.

Models keep their layers in lists and run them from there, so changing such a list changes the model. A layer's
arguments and its result are trees: tuples, lists, dicts and the small objects that models make, with arrays in them. A
``Path`` of indices, keys and names says where a part is in such a tree. Modules and caches are leaves.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import CannotCut

Path = tuple[Any, ...]
LayerWatch = Callable[[Any, Any, Any], Any]  # a layer, its positional and named arguments -> the result to use for it

SOURCES = ("mlx_lm.models.", "mlx_vlm.models.")
"""The prefixes of modules that contain models' classes."""


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """The place of one layer in a list of the model; changing the list changes the model."""

    holder: list[Any]
    index: int

    @property
    def layer(self) -> Any:
        """The layer or stand-in that is there now."""
        return self.holder[self.index]


def find_layers(model: nn.Module) -> list[LayerSlot]:
    """Return where the model keeps its layers, in their order.

    Raises:
        CannotCut: the layers are not in a list that can be found.
    """
    lists = [v for _, module in model.named_modules() for v in module.values() if isinstance(v, list)]
    places = {id(layer): LayerSlot(held, i) for held in lists for i, layer in enumerate(held)}
    slots = [places.get(id(layer)) for layer in getattr(model, "layers", None) or ()]
    if not slots or None in slots:
        raise CannotCut(f"{type_name(model)} does not keep its layers in a list")
    return cast(list[LayerSlot], slots)


class StandIn:
    """Replaces a layer in a model's list, or a cache, and has the real one's attributes and class."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # models ask isinstance
        return self._real.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __contains__(self, name: str) -> bool:  # MLX's modules are dicts
        return name in self._real

    def __getitem__(self, name: Any) -> Any:
        return self._real[name]


class Watched(StandIn):
    """A layer that ``watch`` calls in place of the model."""

    def __init__(self, real: Any, watch: LayerWatch) -> None:
        super().__init__(real)
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result that ``watch`` gives for the layer."""
        return self._watch(self._real, args, kwargs)


@contextmanager
def replaced(slots: Sequence[LayerSlot], stand_ins: Mapping[int, Any]) -> Iterator[None]:
    """Replace some layers by stand-ins, given by layer number, during the ``with`` block."""
    before = {i: slots[i].layer for i in stand_ins}
    try:
        for i, stand_in in stand_ins.items():
            slots[i].holder[slots[i].index] = stand_in
        yield
    finally:
        for i, layer in before.items():
            slots[i].holder[slots[i].index] = layer


@contextmanager
def children_watched(watches: Sequence[tuple[nn.Module, str, LayerWatch]]) -> Iterator[None]:
    """Let watches call children of layers, given as (holder, key, watch), during the ``with`` block."""
    before = [(holder, key, holder[key]) for holder, key, _ in watches]
    try:
        for holder, key, watch in watches:
            holder[key] = Watched(holder[key], watch)
        yield
    finally:
        for holder, key, child in before:
            holder[key] = child


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and parts of a container, or of an object that a model made to hold arrays."""
    if isinstance(value, nn.Module | StandIn) or hasattr(value, "is_trimmable"):
        return  # modules and caches are leaves
    if isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from list(value.items())
    elif type(value).__module__.startswith(SOURCES):
        yield from list(vars(value).items())


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield a tree and all its parts, each with its path. The whole tree comes first."""
    yield path, value
    for key, part in _children(value):
        yield from walk(part, (*path, key))


def floating_arrays(value: Any) -> Iterator[tuple[Path, mx.array]]:
    """Return the floating-point arrays in a tree (layers compute these), each with its path."""
    return ((path, array) for path, array in arrays_in(value) if mx.issubdtype(array.dtype, mx.floating))


def arrays_in(value: Any) -> Iterator[tuple[Path, mx.array]]:
    """Yield the arrays of numbers in a tree, floating-point or integer, each with its path."""
    for path, part in walk(value):
        if isinstance(part, mx.array) and part.dtype != mx.bool_:
            yield path, part


def get_at(value: Any, path: Path) -> Any:
    """Return the part of a tree at ``path``."""
    for key in path:
        value = value[key] if isinstance(value, list | tuple | dict) else getattr(value, key)
    return value


def put_at(value: Any, path: Path, new: Any) -> Any:
    """Return ``value`` with ``new`` at ``path``. Tuples are rebuilt, everything else is changed in place."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return (*value[:key], put_at(value[key], rest, new), *value[key + 1 :])
    if isinstance(value, list | dict):
        value[key] = put_at(value[key], rest, new)
    else:
        setattr(value, key, put_at(getattr(value, key), rest, new))
    return value


def change(value: Any, new: Callable[[Path, mx.array], mx.array]) -> Any:
    """Return ``value`` with every array of numbers replaced by what ``new`` returns for it."""
    for path, array in list(arrays_in(value)):
        value = put_at(value, path, new(path, array))
    return value


def call_model(
    model: nn.Module,
    tokens: mx.array,
    caches: Sequence[Any],
    positions: Callable[[], mx.array],
    embeddings: mx.array | None = None,
) -> mx.array:
    """Return the logits of [B, n] tokens.

    ``positions``: of the tokens, [B, n] or [3, B, n]. Some models store positions on themselves. They get these,
    because the next call may be for another sequence; if such a model does not say which form it takes, its stored
    positions are cleared. ``embeddings``: [B, n, d], used in place of the tokens' own.
    """
    extra = {}
    if hasattr(model, "_position_ids"):
        if hasattr(model, "get_rope_index"):
            extra["position_ids"] = _as_noted(model, positions())
        else:
            model._position_ids = None
    if embeddings is not None:
        extra["inputs_embeds"] = embeddings
    result = model(tokens, cache=caches, **extra)
    return cast(mx.array, getattr(result, "logits", result))  # mlx-vlm's models return a record


def _as_noted(model: Any, positions: mx.array) -> mx.array:
    """Return the positions [B, n] of text in the form that the model itself makes. Some models have three per token."""
    if positions.ndim == 3:
        return positions
    made, _ = model.get_rope_index(mx.zeros((1, 1), mx.int32))
    return (
        positions if made.ndim == positions.ndim else mx.broadcast_to(positions, (*made.shape[:-2], *positions.shape))
    )


def type_name(model: nn.Module) -> str:
    """Return mlx-lm's name of the architecture."""
    return str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1]))


def signature(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return what layers that run the same code have in common: the classes of their modules, the shapes of their
    parameters, and their bool and str attributes. Integers are left out, because most say where a layer is."""
    modules = list(layer.named_modules())
    classes = sorted((path, type(module).__name__) for path, module in modules)
    shapes = sorted((path, tuple(array.shape)) for path, array in tree_flatten(layer.parameters()))
    switches = [
        (path, name, value)
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, bool | str) and not name.startswith("_")
    ]
    return *classes, *shapes, *sorted(switches, key=repr)


def nbytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def copied(module: nn.Module) -> Any:
    """Return a copy of a module with the same arrays and functions."""
    memo: dict[int, Any] = {id(array): array for _, array in tree_flatten(module.parameters())}
    for one in module.modules():
        memo |= {id(value): value for value in vars(one).values() if callable(value)}  # a compiled one has no copy
    return copy.deepcopy(module, memo)


def last_rows(array: mx.array, num_rows: int, axis: int) -> mx.array:
    """Return the last ``num_rows`` rows along an axis."""
    here = array.shape[axis]
    return array if here <= num_rows else array[(slice(None),) * axis + (slice(here - num_rows, here),)]
