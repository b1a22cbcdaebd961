"""One mlx-lm model class, run for its layers [start, end) only; no code per architecture.

The class and its lists of layers stay whole, so ``zip(self.layers, cache)``, ``layer_types[i]`` and
``fa_idx`` stay true, and its own ``__call__`` runs unchanged. Only what the lists hold changes, and
only while this stage runs:

    index      0 ... start-1      start         ...      end-1           end
    holds      passthrough        inject(real)  real     real            border

A *passthrough* gives on what it was given and shows every attribute of the layer it stands for.
*Inject* puts what was received in the place of its arguments. The *border* takes its own arguments
for the next stage and ends the call. On the last stage there is no border; a *tap* behind the last
layer keeps only the rows that want logits, so that norm and head see no others. What the model
computes besides (an embedding nobody reads) is never evaluated, because MLX is lazy: it costs neither
time nor the memory of its weights.

What crosses a border is found, not listed (``Anatomy``): the whole model is called once on a few
tokens, nothing is computed, and MLX's graph tells which arguments of a layer come from the layers
before it. For most models that is one hidden state. Some hand on more (a first value, a residual of
each block), and some let later layers attend to the keys and values of an earlier one: then the new
keys and values cross too, and the later stage keeps a replica of that cache. All of it has one row a
token and is packed into one array, so that the rest of the house knows only of hidden states. Where
something else crosses, the cut is refused with its reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from splitinfer.errors import CannotCut
from splitinfer.models.caches import Cache, Place, arrays_of, make_list, share
from splitinfer.models.trace import Graph, uncompiled

Path = tuple[Any, ...]
Named = dict[str, mx.array]

_STEPS = (3, 7)  # rows of the two calls that show how a model is made: what grows from one to the other
_SELF_CHECK = (3, 1)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one layer in a list of the model; changing the list changes the model."""

    holder: list[Any]
    index: int

    @property
    def layer(self) -> Any:
        """What stands there now."""
        return self.holder[self.index]


def find_layers(model: nn.Module) -> list[Slot]:
    """Where the model keeps its layers.

    Raises:
        CannotCut: in no list that can be found.
    """
    lists = [v for _, module in model.named_modules() for v in module.values() if isinstance(v, list)]
    places = {id(layer): Slot(held, i) for held in lists for i, layer in enumerate(held)}
    slots = [places.get(id(layer)) for layer in getattr(model, "layers", None) or ()]
    if not slots or None in slots:
        raise CannotCut(f"{_type_name(model)} keeps its layers in no list that can be found")
    return cast(list[Slot], slots)


# --- what a layer is called with, as a tree ---------------------------------------------------------


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container, or of an object that a model made to carry arrays along."""
    if isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif _carries(value):
        yield from vars(value).items()


def _carries(value: Any) -> bool:
    return type(value).__module__.startswith("mlx_lm.models.") and not isinstance(value, nn.Module) and not _caches(value)


def _caches(value: Any) -> bool:
    return hasattr(value, "is_trimmable") or isinstance(value, _StandIn)


def _arrays(value: Any, path: Path = ()) -> Iterator[tuple[Path, mx.array]]:
    if isinstance(value, mx.array):
        yield path, value
    elif not _caches(value):
        for key, part in _children(value):
            yield from _arrays(part, (*path, key))


def _get(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if isinstance(value, list | tuple | dict) else getattr(value, key)
    return value


def _put(value: Any, path: Path, new: Any) -> Any:
    """``value`` with ``new`` at ``path``; tuples are made anew, everything else is changed in place."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return (*value[:key], _put(value[key], rest, new), *value[key + 1 :])
    if isinstance(value, list | dict):
        value[key] = _put(value[key], rest, new)
    else:
        setattr(value, key, _put(getattr(value, key), rest, new))
    return value


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _marked(value: Any, mark: Callable[[Path, mx.array], mx.array]) -> Any:
    """``value`` with every floating array replaced by an equal one that is known by name."""
    for path, array in list(_arrays(value)):
        if _is_float(array):
            value = _put(value, path, mark(path, array))
    return value


def _mark(named: Named, name: str, array: mx.array) -> mx.array:
    # A sum with a named array of the same shape is one node in the graph, whoever assigns into the
    # sum later.
    named[name] = mx.zeros(array.shape, array.dtype)
    return array + named[name]


# --- how a model is made ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """An array with one row a token. ``path``: where among a layer's arguments, or (cache, part)."""

    path: Path
    axis: int
    shape: tuple[int, ...]  # without the axis of the rows
    dtype: mx.Dtype

    @property
    def width(self) -> int:
        """Numbers a token."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Border:
    """What crosses from the layers before ``layer`` to it and the ones after it."""

    layer: int
    rows: tuple[Row, ...]
    updates: tuple[Row, ...]  # new keys and values of caches that both sides need

    @property
    def shared(self) -> tuple[int, ...]:
        """The caches whose updates cross."""
        return tuple(dict.fromkeys(row.path[0] for row in self.updates))

    @property
    def _all(self) -> tuple[Row, ...]:
        return self.rows + self.updates

    @property
    def _plain(self) -> bool:
        return len(self._all) == 1 and self.rows[0].axis == 1 and len(self.rows[0].shape) == 2

    @property
    def width(self) -> int:
        """Numbers a token."""
        return sum(row.width for row in self._all)

    @property
    def dtype(self) -> mx.Dtype:
        """What all of it is packed as: the widest, so nothing is lost."""
        kinds = {row.dtype for row in self._all}
        return kinds.pop() if len(kinds) == 1 else mx.float32

    def pack(self, arrays: Sequence[mx.array]) -> mx.array:
        """[1, n, width] of everything that crosses."""
        if self._plain:
            return arrays[0]
        parts = [
            mx.moveaxis(array, row.axis, 0).reshape(array.shape[row.axis], -1).astype(self.dtype)
            for row, array in zip(self._all, arrays, strict=True)
        ]
        return mx.concatenate(parts, axis=1)[None]

    def unpack(self, packed: mx.array) -> list[mx.array]:
        """The arrays that ``pack`` was given."""
        if self._plain:
            return [packed]
        ends = [sum(row.width for row in self._all[:i]) for i in range(1, len(self._all))]
        parts = mx.split(packed[0], ends, axis=1)
        return [
            mx.moveaxis(part.reshape(-1, *row.shape), 0, row.axis).astype(row.dtype)
            for row, part in zip(self._all, parts, strict=True)
        ]


@dataclass(slots=True)
class _Call:
    """One call of one layer: the shapes of its arguments, and what became of them in its result."""

    arguments: dict[Path, tuple[tuple[int, ...], mx.Dtype]]
    result: dict[Path, tuple[int, ...]]
    recipe: Callable[[Any], Any]


class Anatomy:
    """How a model is made, read from two unevaluated calls: its layers, its caches, what they share.

    Raises:
        CannotCut: it does not run its layers one after the other, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.name = model, _type_name(model)
        self.slots = find_layers(model)
        self.layers = [slot.layer for slot in self.slots]
        self._owners = _parameter_owners(self.layers)
        self._named: Named = {}
        self._steps: list[list[_Call]] = []
        self._updates: list[dict[Path, tuple[tuple[int, ...], mx.Dtype]]] = []
        caches = make_prompt_cache(model)
        self.num_caches = len(caches)
        self.users: list[set[int]] = [set() for _ in caches]
        with uncompiled():
            for step, rows in enumerate(_STEPS):
                logits = self._record(step, rows, caches)
        results, self._kept_by = [logits], [[0]]
        for cache in caches:
            arrays = arrays_of(cache)
            self._kept_by.append(list(range(len(results), len(results) + len(arrays))))
            results += arrays
        self._graph = Graph(results, {**self._named, **dict(tree_flatten(model.parameters()))})

    @property
    def num_layers(self) -> int:
        """Layers in the model."""
        return len(self.layers)

    def first_user(self, cache: int) -> int | None:
        """The layer a cache belongs to; ``None`` for one that no layer is given."""
        return min(self.users[cache], default=None)

    def recipe(self, layer: int) -> Callable[[Any], Any]:
        """What a layer hands on if it computes nothing, from its arguments."""
        return self._steps[0][layer].recipe

    def result_rows(self) -> list[tuple[Path, int]]:
        """The parts of the last layer's result that have a row a token, and which axis that is."""
        first, second = (step[-1].result for step in self._steps)
        axes = ((path, _row_axis(shape, second.get(path))) for path, shape in first.items())
        return [(path, axis) for path, axis in axes if axis is not None]

    def border(self, layer: int) -> Border:
        """What crosses in front of ``layer``.

        Raises:
            CannotCut: something else than rows and the keys and values of plain caches.
        """
        rows = self._crossing_rows(layer)
        if not rows:
            raise CannotCut(f"{self.name}: nothing that layer {layer} is given comes from the layers before it")
        closed = [_name(step, layer, row.path) for row in rows for step in range(len(_STEPS))]
        beyond = self._read_beyond(layer, closed)
        updates: list[Row] = []
        if beyond:
            updates = self._shared_updates(layer, closed)
            closed += [_update_name(step, *row.path) for row in updates for step in range(len(_STEPS))]
            beyond = self._read_beyond(layer, closed)
        if beyond:
            name = sorted(beyond)[0]
            raise CannotCut(
                f"{self.name}: layers from {layer} on need what layer {self._owners[name]} computed, and not only "
                "through hidden states or shared keys and values"
            )
        return Border(layer, tuple(rows), tuple(updates))

    def _crossing_rows(self, layer: int) -> list[Row]:
        first, second = (step[layer].arguments for step in self._steps)
        rows = []
        for path, (shape, dtype) in first.items():
            other = second.get(path)
            axis = _row_axis(shape, other[0] if other else None)
            if axis is not None and self._early(layer, self._graph.mixed_with(_name(1, layer, path))):
                rows.append(Row(path, axis, (*shape[:axis], *shape[axis + 1 :]), dtype))
        return rows

    def _shared_updates(self, layer: int, closed: Sequence[str]) -> list[Row]:
        """The keys and values of earlier layers' caches that later layers come upon."""
        names = {
            _update_name(1, *path): (path, shape, dtype)
            for path, (shape, dtype) in self._updates[1].items()
            if (owner := self.first_user(path[0])) is not None and owner < layer
        }
        found = self._graph.read_by(self._results_from(layer), closed) & set(names)
        shared = {names[name][0][0] for name in found}
        rows = []
        for path, shape, dtype in names.values():
            if path[0] in shared:
                rows.append(Row(path, 2, (*shape[:2], *shape[3:]), dtype))
        return rows

    def _results_from(self, layer: int) -> list[int]:
        """The logits, and what the caches of this layer and the later ones keep."""
        later = [c for c in range(self.num_caches) if (owner := self.first_user(c)) is None or owner >= layer]
        return [0, *(i for c in later for i in self._kept_by[c + 1])]

    def _read_beyond(self, layer: int, closed: Sequence[str]) -> set[str]:
        return self._early(layer, self._graph.read_by(self._results_from(layer), closed))

    def _early(self, layer: int, names: set[str]) -> set[str]:
        return {name for name in names if self._owners.get(name, layer) < layer}

    # --- recording

    def _record(self, step: int, rows: int, caches: list[Cache]) -> mx.array:
        calls: list[_Call] = []
        order: list[int] = []
        self._updates.append({})
        positions = {id(part): i for i, cache in enumerate(caches) for part in (cache, *getattr(cache, "caches", ()))}

        def run(layer: int, arguments: Any) -> Any:
            order.append(layer)
            for value in _flat(arguments):
                if id(value) in positions:
                    self.users[positions[id(value)]].add(layer)
            arguments = _marked(arguments, lambda path, a: _mark(self._named, _name(step, layer, path), a))
            shapes = {path: (a.shape, a.dtype) for path, a in _arrays(arguments) if _is_float(a)}
            result = self.layers[layer](*arguments[0], **arguments[1])
            recipe = _make_recipe(arguments, result)
            calls.append(_Call(shapes, {p: a.shape for p, a in _arrays(result) if _is_float(a)}, recipe))
            return result

        stand_ins = {i: _Recorder(layer, i, run) for i, layer in enumerate(self.layers)}
        with _listening(caches, lambda path, a: self._note_update(step, path, a)), replaced(self.slots, stand_ins):
            logits = self.model(mx.zeros((1, rows), mx.int32), cache=caches)
        if order != list(range(self.num_layers)):
            times = "more than once" if len(order) > self.num_layers else "not one after the other"
            raise CannotCut(f"{self.name} runs its layers {times}, so no part of it can run alone")
        self._steps.append(calls)
        return cast(mx.array, logits)

    def _note_update(self, step: int, path: Path, array: mx.array) -> mx.array:
        self._updates[step][path] = (array.shape, array.dtype)
        return _mark(self._named, _update_name(step, *path), array)


def _name(step: int, layer: int, path: Path) -> str:
    return f"argument {step} {layer} {path}"


def _update_name(step: int, cache: int, part: int) -> str:
    return f"update {step} {cache} {part}"


def _row_axis(first: tuple[int, ...], second: tuple[int, ...] | None) -> int | None:
    """The one axis that is as long as the rows of both calls, if nothing else differs."""
    if second is None or len(first) != len(second):
        return None
    changed = [axis for axis in range(len(first)) if first[axis] != second[axis]]
    return changed[0] if len(changed) == 1 and (first[changed[0]], second[changed[0]]) == _STEPS else None


def _parameter_owners(layers: Sequence[Any]) -> dict[str, int]:
    raise NotImplementedError


def _flat(value: Any) -> Iterator[Any]:
    yield value
    for _, part in _children(value):
        yield from _flat(part)


def _type_name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1]))
