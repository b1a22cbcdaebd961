"""Tensor parallelism for classes without ``shard``: finds out which parts of a layer can be halved, and tries it.

A *unit* is a module of a layer (its attention, its MLP, its experts) that ends in matrices which return rows of the
hidden size. A rank keeps half of the columns of these, and of every other parameter the rows that reach its columns:
two backward passes through random numbers show which. So heads, groups of keys and values, gates, fused matrices and
the experts' inner width need no table. What reaches both halves (norms, routers, latent keys and values, indexers) is
whole on both ranks. Counts of heads are halved with the rows.

A unit is used only if both halves, run one after the other on random rows, add up to the whole one: a prompt, a block
of drafts and single tokens. The module is tried with matrices of float32 and of one expert, because neither the format
of numbers nor the choice of experts is changed.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.core.halving import Kept, counts_to_try, half_of_columns, kept_rows
from splitinfer.core.layout import RANKS
from splitinfer.errors import CannotCut
from splitinfer.models.caches.caches import arrays_of, fresh_caches
from splitinfer.models.cut.pretended import PretendedRank, alone, together
from splitinfer.models.library.graph import Graph, uncompiled
from splitinfer.models.library.layers import (
    Path,
    Watched,
    arrays_in,
    call_model,
    change,
    children_watched,
    copied,
    find_layers,
    floating_arrays,
    get_at,
    nbytes,
    put_at,
    replaced,
    signature,
    walk,
)
from splitinfer.models.library.light_imports import experiments

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]  # of one module, in order; its caches are as before the first

_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
_STEPS = (20, 5, 1, 1)  # rows of each call: a prompt, a block of drafts, tokens
_CLOSE = 1e-4  # of the largest number: rounding of sums in float32
_LEAST = 0.2  # of a unit's numbers that a rank must save, or the unit is whole
_LEAST_OF_LAYER = 0.05  # of its layer's, of all experts or of one, as a token reads few: each unit costs a sum


@dataclass(frozen=True, slots=True)
class Unit:
    """How a module is halved. All paths are within it.

    ``rows``: by parameter, what each rank keeps. ``columns``: the modules that keep half of their columns.
    ``counts``: integer attributes that are halved, as (module, name). ``has_group``: the module adds up by itself if
    it is given a group. ``given``: by path in its arguments, what each rank has of keys and values that another layer's
    module returned.
    """

    rows: Mapping[str, Kept]
    columns: tuple[str, ...]
    counts: tuple[tuple[str, str], ...]
    has_group: bool
    given: Mapping[Path, Kept]


Units = dict[str, Unit]  # by the module's path within a layer


# -- halving --------------------------------------------------------------------------------------


def halve(layer: nn.Module, units: Units, group: Any) -> None:
    """Reduce a layer in place to this rank's part of it. Computes nothing.

    Args:
        layer: the layer, with the parameters that ``units`` was found for, or quantised ones.
        group: a group of ``mx.distributed``, or a ``PretendedRank``.
    """
    modules = dict(layer.named_modules())
    for path, unit in units.items():
        _halve(modules[path], unit, group)


def _halve(module: nn.Module, unit: Unit, group: Any) -> None:
    rank, modules = group.rank(), dict(module.named_modules())
    for path, kept in unit.rows.items():
        above, _, name = path.rpartition(".")
        holder = modules[above]
        for each in (name, "scales", "biases") if name == "weight" else (name,):
            if holder.get(each) is not None:
                holder[each] = _rows(holder[each], kept, rank)
    for path in unit.columns:
        holder = modules[path]
        for each in ("weight", "scales", "biases"):
            if holder.get(each) is not None:
                columns = half_of_columns(holder[each].shape[-1], rank)
                holder[each] = mx.contiguous(_range(holder[each], -1, *columns))
        if rank > 0 and "bias" in holder:  # it must be added once
            holder["bias"] = mx.zeros_like(holder["bias"])
    for path, name in unit.counts:
        setattr(modules[path], name, getattr(modules[path], name) // RANKS)
    if unit.has_group:
        module.sharding_group = group
    else:
        module._sums = group
        module.__class__ = _with_sum(type(module))  # type: ignore[arg-type]


def _rows(array: mx.array, kept: Kept, rank: int) -> mx.array:
    runs = [_range(array, kept.axis, *run) for run in kept.runs[rank]]
    return mx.contiguous(mx.concatenate(runs, axis=kept.axis))


def _range(array: mx.array, axis: int, start: int, end: int) -> mx.array:
    return array[(..., slice(start, end), *[slice(None)] * (-1 - axis))]


@cache
def _with_sum(own: type) -> type:
    """Return a class whose call adds up the first array of the result over the ranks."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own.__call__(self, *args, **kwargs)
        path, array = next(floating_arrays(result))
        return put_at(result, path, mx.distributed.all_sum(array, group=self._sums))

    return type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})


# -- finding --------------------------------------------------------------------------------------

_found: dict[Any, list[Units]] = {}


def find_units(model: nn.Module) -> list[Units]:
    """Return the units of each of a model's layers. Layers of equal parts have equal ones. Reads no weight.

    Raises:
        CannotCut: the model does not run as it should.
    """
    slots = find_layers(model)
    signatures = [signature(slot.layer) for slot in slots]
    with alone():  # one thread at a time
        key = (type(model), *signatures)
        if key not in _found:
            with uncompiled(), experiments(), mx.stream(mx.cpu):
                kinds = {kind: signatures.index(kind) for kind in dict.fromkeys(signatures)}
                calls = _calls_of_layers(model, list(kinds.values()))
                units = dict[Any, Units]()
                for (kind, at), own in zip(kinds.items(), calls, strict=True):
                    twin = _twin(slots[at].layer)
                    units[kind] = _units_in(twin, own, [_LEAST_OF_LAYER * size for size in _size(twin)])
            mx.clear_cache()
            _found[key] = [units[kind] for kind in signatures]
        return _found[key]


def _watch_layers(
    model: nn.Module, note: Callable[[int, Any], None], wanted: Sequence[int], steps: Sequence[int]
) -> None:
    """Call a model on so many rows each, with ``note`` called for the arguments of some layers. Computes nothing."""
    caches, slots, at = fresh_caches(model), find_layers(model), 0

    def noted(i: int, layer: Any, args: Any, kwargs: Any) -> Any:
        note(i, (args, kwargs))
        return layer(*args, **kwargs)

    with uncompiled(), replaced(slots, {i: Watched(slots[i].layer, partial(noted, i)) for i in wanted}):
        for rows in steps:
            places = mx.arange(at, at + rows)[None]
            try:
                call_model(model, mx.zeros((1, rows), mx.int32), caches, partial(mx.array, places))
            except Exception as error:  # a model's code may raise anything
                said = " ".join(str(error).split())[:200]
                raise CannotCut(f"its own code fails ({type(error).__name__}: {said})") from error
            at += rows


def passed_on(model: nn.Module) -> list[list[tuple[int, ...]]]:
    """Return for each layer the shapes of the keys and values that it gets of other layers, in a call of a prompt."""
    count = len(find_layers(model))
    found, caches = [list[Any]() for _ in range(count)], list[tuple[int, Any]]()

    def note(i: int, call: Any) -> None:
        found[i] += [array.shape for _, array in _nested(call)]  # half of two heads is one
        caches.extend((i, value) for _, value in walk(call) if hasattr(value, "update_and_fetch"))

    _watch_layers(model, note, range(count), _STEPS[:1])
    for i, own in caches:
        if any(other is own and j != i for j, other in caches):
            found[i] += [array.shape for array in arrays_of(own)]
    return found


def _calls_of_layers(model: nn.Module, wanted: Sequence[int]) -> list[Calls]:
    """Return the calls of some layers: in place of what was computed from parameters they have random numbers."""
    found, memo = {i: Calls() for i in wanted}, dict[int, Any]()  # a cache is copied when it is first met
    _watch_layers(model, lambda i, call: found[i].append(copy.deepcopy(call, memo)), wanted, _STEPS)
    return _made_up(list(found.values()), dict(tree_flatten(model.parameters())))


def _made_up(every: list[Calls], parameters: Mapping[str, mx.array]) -> list[Calls]:
    """Return calls with random numbers in place of the arrays that depend on parameters. A chosen token is one of the
    call's first."""
    arrays = [array for _, array in arrays_in(every)]
    graph = Graph(arrays, parameters)
    computed = {id(array) for i, array in enumerate(arrays) if graph.read_by([i])}

    def new(path: Path, array: mx.array) -> mx.array:
        if id(array) not in computed:
            return array
        key = mx.random.key(hash(path[:2]) % 997 + array.size)
        if mx.issubdtype(array.dtype, mx.floating):
            return mx.random.normal(array.shape, key=key)
        return mx.random.randint(0, array.shape[1], array.shape, array.dtype, key=key)

    return [change(calls, new) for calls in every]


class _OneExpert(nn.Module):  # type: ignore[misc]
    """Stands for a matrix of each expert: all experts have this one."""

    def __call__(self, x: mx.array, indices: mx.array, **_more: Any) -> mx.array:
        rows = x @ self.weight.T + (self.bias if "bias" in self else 0)
        return mx.broadcast_to(rows, (*mx.broadcast_shapes(x.shape[:-2], indices.shape), *rows.shape[-2:]))


def _twin(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer with random matrices of float32, of one expert."""
    return _randomised(copied(layer))


def _randomised(module: nn.Module) -> nn.Module:
    for holder, key, child in list(_children(module)):
        holder[key] = _randomised(child)
    if _is_expert(module):
        num_experts = module.weight.shape[0]
        module = _as_float(module, _OneExpert)
        module._num_experts = num_experts
    elif "scales" in module:
        name = type(module).__name__.removeprefix("Quantized")
        module = _as_float(module, getattr(nn, name, None) or getattr(sys.modules[type(module).__module__], name))
    for seed, (name, array) in enumerate(sorted(module.items(), key=lambda item: item[0])):
        if isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating):
            shape = array.shape[-2:] if isinstance(module, _OneExpert) and name == "weight" else array.shape
            shape = array.shape[-1:] if isinstance(module, _OneExpert) and name == "bias" else shape
            is_table = isinstance(module, nn.Embedding)  # its rows are alike: it may be larger than the memory
            drawn = mx.random.normal(shape[-1:] if is_table else shape, key=mx.random.key(seed + array.size))
            module[name] = mx.broadcast_to(drawn / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * drawn, shape)
    return module


def _as_float(module: nn.Module, kind: type) -> nn.Module:
    """Return a module of another class, with matrices in the shape that they have unquantised."""
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    nn.Module.__init__(made)
    made.__dict__.update({k: v for k, v in vars(module).items() if k not in ("bits", "group_size", "mode")})
    for name, array in module.items():
        if name == "weight" and "scales" in module:
            made[name] = mx.zeros((*array.shape[:-1], array.shape[-1] * 32 // module.bits))
        elif isinstance(array, mx.array) and name not in ("scales", "biases"):
            made[name] = array
    return made


def _is_expert(module: nn.Module) -> bool:
    weight = module.get("weight")
    return weight is not None and weight.ndim == 3 and "indices" in inspect.signature(type(module).__call__).parameters


def _children(module: nn.Module) -> Iterator[tuple[Any, Any, nn.Module]]:
    """Yield the holder, key and module of each child."""
    for key, value in module.items():
        if isinstance(value, nn.Module):
            yield module, key, value
        elif isinstance(value, list | dict):
            items = enumerate(value) if isinstance(value, list) else value.items()
            yield from ((value, k, one) for k, one in items if isinstance(one, nn.Module))


def _units_in(module: nn.Module, calls: Calls, least: Sequence[float], above: str = "") -> Units:
    """Return the units within a module, the outermost that can be halved. ``least``: numbers that each must save,
    counted with one expert, or with all."""
    paths = {id(one): path for path, one in module.named_modules()}
    found = Units()
    for holder, key, child in _children(module):
        path = f"{above}{paths[id(child)]}"
        if child.children() and _is_enough(_size(child), least) and (own := _calls_of(module, holder, key, calls)):
            unit = find_unit(child, own, least)
            found |= _units_in(child, own, least, f"{path}.") if unit is None else {path: unit}
    return found


def _calls_of(module: nn.Module, holder: Any, key: Any, calls: Calls) -> Calls:
    """Return the calls of a child while a module is called."""
    found, memo = Calls(), dict[int, Any]()

    def note(child: Any, args: Any, kwargs: Any) -> Any:
        found.append(copy.deepcopy((args, kwargs), memo))
        return child(*args, **kwargs)

    try:
        with children_watched([(holder, key, note)]):
            _run(module, calls)
    except Exception:  # noqa: BLE001 - a model's code may raise anything
        return Calls()
    mx.eval([array for call in found for _, array in arrays_in(call)])
    return found


def _run(module: nn.Module, calls: Calls) -> list[Any]:
    return [module(*args, **kwargs) for args, kwargs in copy.deepcopy(calls)]


def _first(result: Any) -> mx.array:
    return next(floating_arrays(result))[1]


# -- a unit ---------------------------------------------------------------------------------------


def find_unit(module: nn.Module, calls: Calls, least: Sequence[float] = (0, 0)) -> Unit | None:
    """Return how a module is halved, or ``None`` if it cannot be, or if a rank would save too little of it, or less
    than ``least`` (``_units_in``)."""
    try:
        wholes = _run(module, calls)
        columns = _last_matrices(module, _first(wholes[0]), calls)
        if not columns:
            return None
        masks = _reached(module, calls, columns)
    except Exception:  # noqa: BLE001 - a model's code, and a gradient that MLX does not have
        return None
    rows = {path: kept for path, both in masks.items() if (kept := kept_rows(*both)) is not None}
    given = {path: kept for path, kept in rows.items() if not isinstance(path, str)}
    own = {path: kept for path, kept in rows.items() if isinstance(path, str)}
    unit = Unit(own, tuple(columns), (), "sharding_group" in _names(type(module)), given)
    saved = _saved(module, unit)
    if saved[1] < _LEAST * _size(module)[1] or not _is_enough(saved, least):
        return None
    sizes = {2 * (end - start) for kept in rows.values() for start, end in kept.runs[0]}
    for counts in counts_to_try(_numbers(module, unit), sizes):
        tried = replace(unit, counts=counts)
        if (halves := _halves_of(module, tried, calls)) and _are_close(halves, wholes):
            return tried
    return None


def _names(kind: type) -> tuple[Any, ...]:
    code = getattr(kind.__call__, "__code__", None)
    return () if code is None else (*code.co_names, *code.co_consts)


def _is_enough(sizes: Sequence[float], least: Sequence[float]) -> bool:
    return any(size >= wanted for size, wanted in zip(sizes, least, strict=True))


def _saved(module: nn.Module, unit: Unit) -> list[float]:
    shares = {path: 1 - kept.share for path, kept in unit.rows.items()}
    shares |= {f"{path}.weight": 1 - 1 / RANKS for path in unit.columns}
    return [sum(sizes[path] * share for path, share in shares.items()) for sizes in _sizes(module)]


def _size(module: nn.Module) -> list[int]:
    return [sum(sizes.values()) for sizes in _sizes(module)]


def _sizes(module: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many numbers each parameter has that is not a table, of one expert and of all."""
    modules = dict(module.named_modules())
    one = {
        path: array.size
        for path, array in tree_flatten(module.parameters())
        if not isinstance(modules[path.rpartition(".")[0]], _TABLES)
    }
    return one, {path: n * getattr(modules[path.rpartition(".")[0]], "_num_experts", 1) for path, n in one.items()}


def bytes_of(layer: nn.Module) -> int:
    """Return the bytes of a layer's parameters, without tables, which are whole on both ranks and may be on disk."""
    tables = [one for _, one in layer.named_modules() if isinstance(one, _TABLES)]
    return nbytes(layer) - sum(map(nbytes, tables))


def _last_matrices(module: nn.Module, output: mx.array, calls: Calls) -> list[str]:
    """Return the matrices whose results no other matrix takes, and which are as wide as the module's."""
    matrices = {
        path: one.weight
        for path, one in module.named_modules()
        if not one.children() and getattr(one, "weight", None) is not None and one.weight.ndim == 2
        and not isinstance(one, nn.Embedding)
    }  # fmt: skip
    named = dict(tree_flatten(module.parameters())) | matrices
    graph = Graph([_first(one) for one in _run(module, calls)], named)
    taken = {name for path in matrices for name in graph.met_by(path)}
    return [
        path
        for path, weight in matrices.items()
        if path not in taken and graph.holds(path)
        and weight.shape[0] == output.shape[-1] and weight.shape[1] % RANKS == 0
    ]  # fmt: skip


def _reached(module: nn.Module, calls: Calls, columns: Sequence[str]) -> dict[Any, list[list[list[bool]]]]:
    """Return for each parameter, and each array that another layer's module returned, by rank and axis, which of its
    rows the rank's half of the columns depends on."""
    modules = dict(module.named_modules())
    weights = {path: modules[path].weight for path in columns}
    tables = [path for path, one in modules.items() if isinstance(one, nn.Embedding)]
    left_out = {f"{path}.{name}" for path in (*columns, *tables) for name in ("weight", "bias")}
    named = {
        path: array
        for path, array in tree_flatten(module.parameters())
        if path not in left_out and mx.issubdtype(array.dtype, mx.floating)
    }
    holders = {path: (modules[path.rpartition(".")[0]], path.rpartition(".")[2]) for path in named}
    given = dict(_shared(calls[0]))

    def outputs(arrays: Sequence[mx.array]) -> list[mx.array]:
        for (holder, name), array in zip(holders.values(), arrays, strict=False):
            holder[name] = array
        now = copy.deepcopy(calls)
        for path, array in zip(given, arrays[len(named) :], strict=True):
            now[0] = put_at(now[0], path, array)
        return [_first(module(*args, **kwargs)) for args, kwargs in now]

    every: dict[Any, mx.array] = {**named, **given}
    found: dict[Any, list[list[list[bool]]]] = {path: [] for path in every}
    try:
        shapes = [one.shape for one in outputs(list(every.values()))]
        ahead = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
        for rank in range(RANKS):
            for path, weight in weights.items():
                start, end = half_of_columns(weight.shape[1], rank)
                place = mx.arange(weight.shape[1])
                modules[path].weight = mx.where((place >= start) & (place < end), weight, 0)
            _, gradients = mx.vjp(lambda *arrays: outputs(arrays), list(every.values()), ahead)
            for path, gradient in zip(every, gradients, strict=True):
                axes = range(gradient.ndim)
                reached = [mx.any(gradient != 0, axis=[a for a in axes if a != axis]) for axis in axes]
                found[path].append([one.reshape(-1).tolist() for one in reached])  # type: ignore[misc]
    finally:
        for (holder, name), array in zip(holders.values(), named.values(), strict=True):
            holder[name] = array
        for path, weight in weights.items():
            modules[path].weight = weight
    return found


def _nested(call: Any) -> Iterator[tuple[Path, mx.array]]:
    """Yield the arrays of four dimensions that a call has within other arguments."""
    return ((path, each) for path, each in floating_arrays(call) if len(path) > len((0, "name")) and each.ndim == 4)


def _shared(call: Any) -> Iterator[tuple[Path, mx.array]]:
    """Yield the keys and values in a call that another layer's module returned, [1, heads, rows, d] of several heads,
    and not the angles of rotary positions."""
    return ((path, array) for path, array in _nested(call) if array.shape[0] == 1 < array.shape[1])


def _numbers(module: nn.Module, unit: Unit) -> dict[tuple[str, str], int]:
    """Return the integer attributes of the modules that hold halved parameters."""
    halved = [*(path.rpartition(".")[0] for path in unit.rows), *unit.columns]
    return {
        (path, name): value
        for path, one in module.named_modules()
        for name, value in vars(one).items()
        if type(value) is int and not name.startswith("_") and value > 1 and value % RANKS == 0
        and any(not path or f"{each}.".startswith(f"{path}.") for each in halved)
    }  # fmt: skip


def _halves_of(module: nn.Module, unit: Unit, calls: Calls) -> list[list[Any]]:
    """Return by rank what the halves of a module compute together, or an empty list if they fail."""
    groups, halves, given = [PretendedRank(rank) for rank in range(RANKS)], list[nn.Module](), list[Calls]()
    try:
        for rank, group in enumerate(groups):
            halves.append(copied(module))
            _halve(halves[-1], unit, group)
            given.append([_part_of(call, unit, rank) for call in copy.deepcopy(calls)])
        return together(lambda rank: _run(halves[rank], given[rank]), groups)
    except Exception:  # noqa: BLE001 - a model's code may raise anything
        return []


def _part_of(call: Any, unit: Unit, rank: int) -> Any:
    for path, kept in unit.given.items():
        call = put_at(call, path, _rows(get_at(call, path), kept, rank))
    return call


def _are_close(halves: Sequence[Sequence[Any]], wholes: Sequence[Any]) -> bool:
    """Return whether the halves' first arrays are the whole one's, and their others are its, or its parts."""
    for whole, *parts in zip(wholes, *halves, strict=True):
        for i, (_, array) in enumerate(floating_arrays(whole)):
            each = [list(floating_arrays(part))[i][1] for part in parts]
            joined = each[0]
            if i and joined.shape != array.shape:
                axis = next(axis for axis in range(array.ndim) if joined.shape[axis] != array.shape[axis])
                joined = mx.concatenate(each, axis=axis)
            if joined.shape != array.shape or not _is_close(joined, array):
                return False
    return True


def _is_close(a: mx.array, b: mx.array) -> bool:
    largest = mx.abs(b).max() if b.size else mx.array(0.0)
    return not b.size or bool((mx.abs(a - b).max() <= _CLOSE * largest).item())
