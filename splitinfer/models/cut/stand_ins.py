"""Defines what runs in place of layers, or around them, while a stage runs a model (``models.cut.cut``)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from splitinfer.errors import ModelError
from splitinfer.models.border.border import Border
from splitinfer.models.cut.structure import ModelStructure, Named, Recipe, mark
from splitinfer.models.library.layers import Path, Watched, change, floating_arrays, get_at, put_at

Keep = Callable[[mx.array, int], mx.array]  # an array and the axis of its rows -> the array with the wanted rows


class BorderReached(Exception):
    """Ends a call of the model at the border."""


class Relay:
    """The input and output of the call in progress."""

    def __init__(self) -> None:
        self.received: dict[int, list[mx.array | None]] = {}  # by layer
        self.given: dict[int, list[mx.array | None]] = {}  # by layer, for the next stage
        self.keep: Keep | None = None  # on the last stage: the rows that want logits
        self.tapped: list[mx.array] = []  # taken from the layers' results, [rows, d] each
        self.deep: list[mx.array] = []  # added to the results of the first layers
        self.head_in_float32 = False
        self.stale: Named | None = None  # while a stage is checked: the arrays that passthroughs returned


def _pass(relay: Relay, recipe: Recipe, _layer: Any, args: Any, kwargs: Any) -> Any:
    """Return a result of the form of a layer before this stage, made from its arguments."""
    result, stale = recipe((args, kwargs)), relay.stale
    if stale is None:
        return result
    return change(result, lambda _path, array: mark(stale, f"stale {len(stale)}", array))


def _inject(relay: Relay, index: int, paths: Sequence[Path], layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer with the arrays received for it. It is this stage's first layer, or one that runs again."""
    arguments: Any = (args, kwargs)
    for path, array in zip(paths, relay.received[index], strict=True):
        arguments = put_at(arguments, path, array)
    return layer(*arguments[0], **arguments[1])


def _note(relay: Relay, index: int, paths: Sequence[Path], layer: Any, args: Any, kwargs: Any) -> Any:
    """Keep copies of the arguments that the next stage needs, and call the layer."""
    found = [get_at((args, kwargs), path) for path in paths]
    # Copies, because a layer may add to its arguments in place.
    relay.given[index] = [None if array is None else mx.array(array) for array in found]
    return layer(*args, **kwargs)


def _end(*_call: Any) -> Any:
    """End the call of the model, in place of the first layer after this stage."""
    raise BorderReached


def keep_rows(relay: Relay, rows: Sequence[tuple[Path, int]], layer: Any, args: Any, kwargs: Any) -> Any:
    """Call the last layer and return only the rows of its result that want logits."""
    result = layer(*args, **kwargs)
    if relay.keep is None:
        return result
    for path, axis in rows:
        kept = relay.keep(get_at(result, path), axis)
        result = put_at(result, path, kept.astype(mx.float32) if relay.head_in_float32 else kept)
    return result


def tap(relay: Relay, part: Callable[[mx.array], mx.array], model: str, layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer, and keep ``part`` of the hidden states that it returns, as [rows, d]: the streams of a model with
    hyper-connections are side by side in a row. Gemma 4's layers return keys and values behind them."""
    result = layer(*args, **kwargs)
    hidden, *others = [array for _, array in floating_arrays(result)]
    if hidden.ndim < 3 or any(array.shape == hidden.shape for array in others):
        raise ModelError(f"draft: the hidden states of {model} are not in rows")
    relay.tapped.append(part(mx.flatten(mx.flatten(hidden, 2), 0, 1)))
    return result


def add_deep(relay: Relay, index: int, layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer, and add the pictures' array number ``index`` to its result."""
    result = layer(*args, **kwargs)
    return result + relay.deep[index] if relay.deep else result


def between(
    structure: ModelStructure, incoming: Border | None, outgoing: Border | None, relay: Relay
) -> dict[int, Any]:
    """Return, by layer, the stand-ins for the layers before, at and after a stage's borders."""
    layers, found = structure.layers, dict[int, Any]()

    def passed(several: Iterable[int]) -> dict[int, Any]:
        return {i: Watched(layers[i], partial(_pass, relay, structure.recipe(i))) for i in several}

    if outgoing is not None:
        found[outgoing.layer] = Watched(layers[outgoing.layer], _end)
        if any(map(structure.is_common, range(structure.num_caches))):  # only a complete call advances such a cache
            found = passed(range(outgoing.layer, structure.num_layers))
        for i, rows in outgoing.given.items():
            found[i] = Watched(found.get(i, layers[i]), partial(_note, relay, i, [row.path for row in rows]))
    if incoming is not None:
        sources = {structure.first_user(i) for i in incoming.shared}
        found |= passed(set(range(incoming.layer)) - sources - set(incoming.given))
        for i, rows in incoming.given.items():
            found[i] = Watched(found.get(i, layers[i]), partial(_inject, relay, i, [row.path for row in rows]))
    return found
