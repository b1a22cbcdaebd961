"""Reads the structure of an mlx-lm model: its layers, their caches, and the arrays that they pass to each other.

The whole model is called twice on a few tokens with every layer's arguments and every cache update marked. Nothing is
computed, and MLX's graph shows which array depends on which. A *border* is a cut in front of a layer. It is crossed by

* each of the layer's arguments that comes from earlier layers and has a row per token: hidden states, residuals;
* the new keys and values of an earlier layer's cache, if later layers attend to it;
* the arguments of an earlier layer from which later layers read anything else (a choice of tokens, compressed keys):
  this layer runs again after the border, as far as later layers read its results.

All arrays are packed into one array of rows (``border``). The cut is refused if later layers need anything else. A
layer may choose among tokens only once there are more than it may attend to. So if a few tokens leave a parameter
unread, the model is called on more of them; an array that only such a call passes on crosses from that number of tokens
on (``TokenRow.since``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import CannotCut, ModelError
from splitinfer.models.border.border import Border, TokenRow
from splitinfer.models.caches.caches import Cache, arrays_of, fresh_caches
from splitinfer.models.library.graph import Graph, uncompiled
from splitinfer.models.library.layers import (
    Path,
    Watched,
    arrays_in,
    call_model,
    change,
    find_layers,
    floating_arrays,
    get_at,
    replaced,
    type_name,
    walk,
)

Named = dict[str, mx.array]
Spec = tuple[tuple[int, ...], mx.Dtype]

_STEPS = (3, 7)  # rows of the two calls: an array that grows from the first to the second has a row per token
_BOTH = range(len(_STEPS))  # the indices of these calls in the graph
_MOST_ROWS = 4096  # of a long call
_MOST_AGAIN = 3  # layers that run again after a border

Recipe = Callable[[Any], Any]
"""Makes the result of a layer that does not run: it has the form of the layer's result and is made from its
arguments."""


class _Unknown:
    """Replaces a number that only the layer itself could compute; using it fails."""


def make_recipe(arguments: Any, result: Any) -> Recipe:
    """Return a function that makes a result of the same form from other arguments, without running the layer.

    An array becomes an argument of its shape; an object that was an argument is returned again. The contents of the
    arrays are wrong, so the graph must show that no result depends on them.
    """
    if result is None or isinstance(result, bool | str):
        return lambda _arguments: result
    if isinstance(result, mx.array) and not mx.issubdtype(result.dtype, mx.floating):
        shape, dtype = result.shape, result.dtype
        return lambda _arguments: mx.zeros(shape, dtype)
    if isinstance(result, mx.array):
        inputs = list(floating_arrays(arguments))
        if not inputs:
            raise CannotCut("a layer is called without any array")
        path = next((path for path, a in inputs if a.shape == result.shape), inputs[0][0])
        return lambda now: get_at(now, path)
    if isinstance(result, list | tuple):
        recipes, kind = [make_recipe(arguments, part) for part in result], type(result)
        return lambda now: kind(recipe(now) for recipe in recipes)
    same = next((path for path, part in walk(arguments) if part is result), None)
    if same is not None:
        return lambda now: get_at(now, same)
    return lambda _arguments: _Unknown()


class CannotTrace(CannotCut):
    """The model reads values while it is called, so its graph does not show its inputs."""


def mark(named: Named, name: str, array: mx.array) -> mx.array:
    """Return ``array`` plus a zero array that is registered in ``named``."""
    # The sum stays one node in the graph even if the model assigns into it later.
    named[name] = mx.zeros(array.shape, array.dtype)
    return array + named[name]


@dataclass(slots=True)
class _Call:
    """One call of one layer: the shapes and dtypes of its arguments and of its result."""

    arguments: dict[Path, Spec]
    result: dict[Path, Spec]
    recipe: Recipe


class ModelStructure:
    """The structure of a model, read from two unevaluated calls: its layers, its caches, and the caches that layers
    share.

    Attributes:
        long_rows: the rows of a call that reads parameters which a short call does not; ``None`` if a short call reads
            all of them.

    Raises:
        CannotCut: the model does not run its layers one after the other, each once.
        ModelError: the model's own code fails.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.name = model, type_name(model)
        self.slots = find_layers(model)
        self.layers = [slot.layer for slot in self.slots]
        parameters = dict(tree_flatten(model.parameters()))
        self._owners = _owners(self.layers, parameters)
        self._layer_of: dict[str, int]  # of parameters and of marked arguments
        self._named: Named
        self._steps: list[list[_Call]]
        self._updates: list[dict[Path, Spec]]
        self._written: dict[int, list[tuple[int, mx.array]]]  # of caches that several layers get: layer, array
        self._borders: dict[int, Border] = {}
        self._given_with: dict[int, list[set[Path]]] = {}
        self._rows = _STEPS
        self._graph = self._read(parameters)
        self.long_rows: int | None = None
        self._short = self._steps
        if set(self._owners) - self._graph.read_by(self._results_from(0)):
            self.long_rows = min(_MOST_ROWS, max(_whole_numbers(self.layers), default=0)) + _STEPS[0]
            self._rows = (self.long_rows, self.long_rows + _STEPS[1] - _STEPS[0])
            self._graph = self._read(parameters)
        calls = enumerate(self._steps[1])
        if not all(any(self._graph.holds(_name(1, i, path)) for path in call.arguments) for i, call in calls):
            raise CannotTrace(f"{self.name} looks at what it has computed while it runs, so its graph is in pieces")

    def of(self, model: nn.Module) -> "ModelStructure":
        """Return the structure of ``model``, which differs from this one's in the values of its parameters alone."""
        found = copy(self)
        found.model, found.slots = model, find_layers(model)
        found.layers = [slot.layer for slot in found.slots]
        return found

    def _read(self, parameters: Named) -> Graph:
        """Call the model with the rows of ``_rows``. Return the graph of the logits and of its caches' arrays."""
        caches = fresh_caches(self.model)
        self.num_caches, self.users = len(caches), [set[int]() for _ in caches]
        self._layer_of, self._named = dict(self._owners), {}
        self._steps, self._updates, self._written = [], [], {}
        with uncompiled():
            results = [[self._record(step, rows, caches) for step, rows in enumerate(self._rows)][-1]]
        self._of_caches = list[tuple[int, int | None]]()
        for i, cache in enumerate(caches):
            arrays = arrays_of(cache)
            self._of_caches += [(i, self._writer(i, array)) for array in arrays]
            results += arrays
        return Graph(results, {**self._named, **parameters})

    def _since(self, layer: int, path: Path) -> int:
        """Return the number of tokens in a sequence from which on a layer has an argument."""
        if path in self._short[0][layer].arguments:
            return 0
        below, above = sum(_STEPS), self._rows[0]
        while below + 1 < above:
            middle = (below + above) // 2
            below, above = (below, middle) if path in self._given(middle)[layer] else (middle, above)
        return above

    def _given(self, rows: int) -> list[set[Path]]:
        """Return the paths of the arrays that each layer gets in a first call with ``rows`` rows."""
        if rows not in self._given_with:
            found: list[set[Path]] = []

            def note(layer: Any, args: Any, kwargs: Any) -> Any:
                found.append({path for path, _ in arrays_in((args, kwargs))})
                return layer(*args, **kwargs)

            stand_ins = {i: Watched(layer, note) for i, layer in enumerate(self.layers)}
            with uncompiled(), replaced(self.slots, stand_ins):
                tokens, caches = mx.zeros((1, rows), mx.int32), fresh_caches(self.model)
                self._call(tokens, caches)
            self._given_with[rows] = found
        return self._given_with[rows]

    def _call(self, tokens: mx.array, caches: Sequence[Cache], at: int = 0) -> mx.array:
        """Call the model and return its logits. ``at``: the position of the first token."""
        try:
            return call_model(self.model, tokens, caches, lambda: mx.arange(at, at + tokens.shape[1])[None])
        except Exception as error:  # a model's code may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ModelError(f"{self.name} cannot run on text tokens alone: its own code fails ({reason})") from error

    @property
    def reads_tokens(self) -> bool:
        """Whether the model looks at its tokens while it is called, so that its graph holds for these tokens only."""
        return not all(self._graph.holds(f"tokens {step}") for step in _BOTH)

    @property
    def num_layers(self) -> int:
        """The number of layers in the model."""
        return len(self.layers)

    def first_user(self, cache: int) -> int | None:
        """Return the layer that a cache belongs to: the first that is called with it. Return None if no layer is."""
        return min(self.users[cache], default=None)

    def is_common(self, cache: int) -> bool:
        """Return whether several layers write to a cache, each to its own part. Every stage has such a cache."""
        return len({writer for c, writer in self._of_caches if c == cache and writer is not None}) > 1

    def _writer(self, cache: int, array: mx.array) -> int | None:
        """Return the layer that made an array of a cache. Return None if it was made outside of layers."""
        written = {id(a): layer for layer, a in self._written.get(cache, ())}
        if len(self.users[cache]) > 1 and written:
            return written.get(id(array))
        return self.first_user(cache)

    def hidden_from(self, layer: int) -> set[str]:
        """Return the parameters that a stage from ``layer`` on must not read: of earlier layers that do not run
        again."""
        again = self._borders[layer].replicas if layer in self._borders else ()
        return {name for name, owner in self._owners.items() if owner < layer and owner not in again}

    def recipe(self, layer: int) -> Recipe:
        """Return a layer's recipe: it makes a result of the right form from the arguments and computes nothing."""
        return self._steps[0][layer].recipe

    def result_rows(self) -> list[tuple[Path, int]]:
        """Return the parts of the last layer's result that have a row per token, each with the axis of its rows."""
        first, second = (step[-1].result for step in self._steps)
        axes = {path: _row_axis(spec, second.get(path), self._rows) for path, spec in first.items()}
        return [(path, axis) for path, axis in axes.items() if axis is not None and path in self._short[-1][-1].result]

    def border(self, layer: int) -> Border:
        """Return the border in front of ``layer``.

        Raises:
            CannotCut: later layers need arrays that cannot cross.
        """
        if layer not in self._borders:
            self._borders[layer] = self._find_border(layer)
        return self._borders[layer]

    def _find_border(self, layer: int) -> Border:
        rows = self._crossing_rows(layer)
        if not rows:
            raise CannotCut(f"{self.name}: layer {layer} gets no rows from the layers before it")
        closed = self._closed(layer, rows)
        if not self._read_beyond(layer, closed):
            return Border(layer, tuple(rows), ())
        updates = self._shared_updates(layer, closed)
        with_updates = [*closed, *(_update_name(step, *row.path) for row in updates for step in _BOTH)]
        if not self._read_beyond(layer, with_updates):
            return Border(layer, tuple(rows), tuple(updates))
        return Border(layer, tuple(rows), (), self._find_replicas(layer, closed))

    def _find_replicas(self, layer: int, closed: list[str]) -> dict[int, tuple[TokenRow, ...]]:
        """Return the earlier layers that run again after a border, each with the rows that it gets there. The search
        goes back from the last one, because its arguments may be all that is read of the layers before it."""
        found = dict[int, tuple[TokenRow, ...]]()
        while beyond := {name for name in self._read_beyond(layer, closed) if self._layer_of[name] not in found}:
            last = max(self._layer_of[name] for name in beyond)
            rows = self._crossing_rows(last) if last else []
            new = self._closed(last, rows)
            if not beyond - set(new) or len(found) == _MOST_AGAIN:
                raise CannotCut(
                    f"{self.name}: layers from {layer} on look back on layer {last}, and not only at its output or "
                    "its keys and values"
                )
            found[last], closed = tuple(rows), [*closed, *new]
        return dict(sorted(found.items()))

    def _closed(self, layer: int, rows: Sequence[TokenRow]) -> list[str]:
        return [_name(step, layer, row.path) for row in rows for step in _BOTH]

    def _crossing_rows(self, layer: int) -> list[TokenRow]:
        first, second = (step[layer].arguments for step in self._steps)
        rows = []
        for path, spec in first.items():
            axis = _row_axis(spec, second.get(path), self._rows)
            if axis is not None and self._early(layer, self._graph.mixed_with(_name(1, layer, path))):
                rows.append(_row(path, axis, spec, self._since(layer, path)))
        return rows

    def _shared_updates(self, layer: int, closed: Sequence[str]) -> list[TokenRow]:
        """Return the new keys and values of earlier layers' caches that later layers read."""
        names = {
            _update_name(1, *path): (path, spec)
            for path, spec in self._updates[1].items()
            if (owner := self.first_user(path[0])) is not None and owner < layer
        }
        closed = [*closed, *(_update_name(step, *path) for path, _ in names.values() for step in _BOTH)]
        found = self._graph.read_by(self._results_from(layer), closed) & set(names)
        shared = {names[name][0][0] for name in found}
        return [_row(path, 2, spec) for path, spec in names.values() if path[0] in shared]

    def _results_from(self, layer: int) -> list[int]:
        """Return the indices of the results of the layers from ``layer`` on: the logits and their caches' arrays."""
        return [0, *(i for i, (_, writer) in enumerate(self._of_caches, 1) if writer is None or writer >= layer)]

    def _read_beyond(self, layer: int, closed: Sequence[str]) -> set[str]:
        return self._early(layer, self._graph.read_by(self._results_from(layer), closed))

    def _early(self, layer: int, names: set[str]) -> set[str]:
        return {name for name in names if self._layer_of.get(name, layer) < layer}

    # --- recording

    def _record(self, step: int, rows: int, caches: list[Cache]) -> mx.array:
        calls: list[_Call] = []
        order: list[int] = []
        self._updates.append({})
        positions = {id(part): i for i, cache in enumerate(caches) for part in (cache, *getattr(cache, "caches", ()))}

        def note(index: int, layer: Any, args: Any, kwargs: Any) -> Any:
            order.append(index)
            for _, value in walk((args, kwargs)):
                if id(value) in positions:
                    self.users[positions[id(value)]].add(index)
            given = {path: (a.shape, a.dtype) for path, a in arrays_in((args, kwargs))}
            self._layer_of |= {_name(step, index, path): index for path in given}
            arguments = change((args, kwargs), lambda path, a: mark(self._named, _name(step, index, path), a))
            result = layer(*arguments[0], **arguments[1])
            self._note_written(index, caches)
            returned = {path: (a.shape, a.dtype) for path, a in arrays_in(result)}
            calls.append(_Call(given, returned, make_recipe(arguments, result)))
            return result

        def note_update(path: Path, array: mx.array) -> mx.array:
            self._updates[step][path] = (array.shape, array.dtype)
            return mark(self._named, _update_name(step, *path), array)

        stand_ins = {i: Watched(layer, partial(note, i)) for i, layer in enumerate(self.layers)}
        with _updates_passed(caches, note_update), replaced(self.slots, stand_ins):
            at = sum(self._rows[:step])
            tokens = mark(self._named, f"tokens {step}", mx.zeros((1, rows), mx.int32))
            logits = self._call(tokens, caches, at)
        if order != list(range(self.num_layers)):
            times = "more than once" if len(order) > self.num_layers else "not one after the other"
            raise CannotCut(f"{self.name} runs its layers {times}, so no part of it can run alone")
        self._steps.append(calls)
        return logits

    def _note_written(self, layer: int, caches: Sequence[Cache]) -> None:
        """Record which arrays of its states a layer has written."""
        for i, cache in enumerate(caches):
            if layer in self.users[i] and not hasattr(cache, "update_and_fetch"):
                known = self._written.setdefault(i, [])
                before = {id(array) for _, array in known}
                known += [(layer, array) for array in arrays_of(cache) if id(array) not in before]


def _name(step: int, layer: int, path: Path) -> str:
    return f"argument {step} {layer} {path}"


def _update_name(step: int, cache: int, part: int) -> str:
    return f"update {step} {cache} {part}"


def _row_axis(first: Spec, second: Spec | None, rows: tuple[int, int]) -> int | None:
    """Return the axis whose length is the number of rows in both calls. Return None if another axis differs, too."""
    if second is None or len(first[0]) != len(second[0]):
        return None
    changed = [axis for axis, (a, b) in enumerate(zip(first[0], second[0], strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and (first[0][changed[0]], second[0][changed[0]]) == rows else None


def _row(path: Path, axis: int, spec: Spec, since: int = 0) -> TokenRow:
    shape, dtype = spec
    return TokenRow(path, axis, (*shape[:axis], *shape[axis + 1 :]), dtype, since)


def _owners(layers: Sequence[Any], parameters: Named) -> dict[str, int]:
    """Return the layer of each parameter that belongs to exactly one layer."""
    layers_of: dict[int, set[int]] = {}
    for i, layer in enumerate(layers):
        for _, array in tree_flatten(layer.parameters()):
            layers_of.setdefault(id(array), set()).add(i)
    return {name: min(found) for name, a in parameters.items() if len(found := layers_of.get(id(a), set())) == 1}


def _whole_numbers(layers: Sequence[nn.Module]) -> Iterator[int]:
    """Yield the integer attributes of layers' modules, such as windows, and counts of experts and of chosen tokens."""
    for layer in layers:
        for _, module in layer.named_modules():
            yield from (value for value in vars(module).values() if type(value) is int)


@contextmanager
def _updates_passed(caches: Sequence[Cache], note: Callable[[Path, mx.array], mx.array]) -> Iterator[None]:
    """Pass the new keys and values of every plain cache through ``note``, during the ``with`` block."""

    def wrap(i: int, cache: Cache) -> None:
        update = cache.update_and_fetch
        cache.update_and_fetch = lambda keys, values: update(note((i, 0), keys), note((i, 1), values))

    wrapped = [(i, cache) for i, cache in enumerate(caches) if hasattr(cache, "update_and_fetch")]
    for i, cache in wrapped:
        wrap(i, cache)
    try:
        yield
    finally:
        for _, cache in wrapped:
            del cache.update_and_fetch
