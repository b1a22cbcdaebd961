"""What stands in for layers while a stage runs a model (``models.cut``): they drop, inject, end, watch and tap."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from splitinfer.models.border import Border
from splitinfer.models.layers import Path, StandIn, change, get_at, put_at
from splitinfer.models.structure import Named, Recipe, mark

Keep = Callable[[mx.array, int], mx.array]  # an array and the axis of its rows -> the array with the wanted rows
Watch = Callable[[Any, Any, Any], Any]  # a layer, its arguments and its named ones -> what it is taken to return


class Reached(Exception):
    """Ends a call of the model at the border."""


class Relay:
    """The input and output of the call in progress."""

    def __init__(self) -> None:
        self.received: list[mx.array | None] = []
        self.given: Any = None
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
    """This stage's first layer, called with the arrays that were received."""

    def __init__(self, real: Any, border: Border, relay: Relay) -> None:
        super().__init__(real)
        self._paths, self._relay = [row.path for row in border.rows], relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (args, kwargs)
        for path, array in zip(self._paths, self._relay.received, strict=True):
            arguments = put_at(arguments, path, array)
        return self._real(*arguments[0], **arguments[1])


class EndAtBorder(StandIn):
    """In place of the first layer behind this stage's: notes its arguments, and ends the call."""

    def __init__(self, real: Any, relay: Relay) -> None:
        super().__init__(real)
        self._relay = relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._relay.given = (args, kwargs)
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
