"""What stands in for layers while a stage runs a model (``models.cut``): they drop, inject, end, watch and tap."""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from splitinfer.models.border import Border
from splitinfer.models.layers import Path, StandIn, change, get_at, put_at
from splitinfer.models.recipes import Recipe
from splitinfer.models.structure import ModelStructure, Named, mark

Keep = Callable[[mx.array, int], mx.array]  # an array and the axis of its rows -> the array with the wanted rows
Watch = Callable[[Any, Any, Any], Any]  # a layer, its arguments and its named ones -> what it is taken to return


class Reached(Exception):
    """Ends a call of the model at the border."""


class Relay:
    """The input and output of the call in progress."""

    def __init__(self) -> None:
        self.received: dict[int, list[mx.array | None]] = {}  # by layer
        self.given: dict[int, list[mx.array | None]] = {}  # the same of what the next stage needs
        self.keep: Keep | None = None  # on the last stage: the rows that want logits
        self.tapped: list[mx.array] = []  # what is taken of the layers' results, [rows, d] each
        self.deep: list[mx.array] = []  # what is added to the results of the first layers
        self.head_in_float32 = False
        self.stale: Named | None = None  # while a stage is checked: what passthroughs returned


class Passthrough(StandIn):
    """In place of a layer before this stage's: returns a result of its form, of the arguments."""

    def __init__(self, real: Any, recipe: Recipe, relay: Relay) -> None:
        super().__init__(real)
        self._recipe, self._relay = recipe, relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, stale = self._recipe((args, kwargs)), self._relay.stale
        if stale is None:
            return result
        return change(result, lambda _path, array: mark(stale, f"stale {len(stale)}", array))


class Inject(StandIn):
    """A layer that is called with the arrays that were received for it: this stage's first, or one that runs again."""

    def __init__(self, real: Any, index: int, border: Border, relay: Relay) -> None:
        super().__init__(real)
        self._index, self._paths, self._relay = index, [row.path for row in border.given[index]], relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (args, kwargs)
        for path, array in zip(self._paths, self._relay.received[self._index], strict=True):
            arguments = put_at(arguments, path, array)
        return self._real(*arguments[0], **arguments[1])


class Noted(StandIn):
    """A layer that is given something that the next stage needs, too."""

    def __init__(self, real: Any, index: int, border: Border, relay: Relay) -> None:
        super().__init__(real)
        self._index, self._paths, self._relay = index, [row.path for row in border.given[index]], relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = [get_at((args, kwargs), path) for path in self._paths]
        # Others of the same content: a layer may add to those it was given, in place.
        self._relay.given[self._index] = [None if array is None else mx.array(array) for array in found]
        return self._real(*args, **kwargs)


class EndAtBorder(StandIn):
    """Ends the call, in the place of the first layer behind this stage's."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise Reached


class Watched(StandIn):
    """A layer that ``watch`` calls in the place of the model."""

    def __init__(self, real: Any, watch: Watch) -> None:
        super().__init__(real)
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(self._real, args, kwargs)


class Tap(StandIn):
    """The last layer; of its result only the rows that want logits go on."""

    def __init__(self, real: Any, rows: list[tuple[Path, int]], relay: Relay) -> None:
        super().__init__(real)
        self._rows, self._relay = rows, relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, keep = self._real(*args, **kwargs), self._relay.keep
        if keep is None:
            return result
        for path, axis in self._rows:
            rows = keep(get_at(result, path), axis)
            result = put_at(result, path, rows.astype(mx.float32) if self._relay.head_in_float32 else rows)
        return result


def between(
    structure: ModelStructure, incoming: Border | None, outgoing: Border | None, relay: Relay
) -> dict[int, Any]:
    """What stands in for the layers before, at and behind a stage's borders, by layer."""
    layers, found = structure.layers, dict[int, Any]()

    def passed(several: Iterable[int]) -> dict[int, Any]:
        return {i: Passthrough(layers[i], structure.recipe(i), relay) for i in several}

    if outgoing is not None:
        found[outgoing.layer] = EndAtBorder(layers[outgoing.layer])
        if any(map(structure.is_common, range(structure.num_caches))):  # its call advances such a cache at its end
            found = passed(range(outgoing.layer, structure.num_layers))
        for i in outgoing.given:
            found[i] = Noted(found.get(i, layers[i]), i, outgoing, relay)
    if incoming is not None:
        sources = {structure.first_user(i) for i in incoming.shared}
        found |= passed(set(range(incoming.layer)) - sources - set(incoming.given))
        for i in incoming.given:
            found[i] = Inject(found.get(i, layers[i]), i, incoming, relay)
    return found
