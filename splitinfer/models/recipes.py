"""What a layer that does not run returns in its place: something of the form of its result, made of its arguments."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from splitinfer.errors import CannotCut
from splitinfer.models.layers import floating_arrays, get_at, walk

Recipe = Callable[[Any], Any]


class _Unknown:
    """Replaces a number that only running the layer would tell; using it fails."""


def make_recipe(arguments: Any, result: Any) -> Recipe:
    """A function that makes a result of the same form from other arguments, without running the layer.

    An array becomes some argument of its shape; an object that was an argument is returned again. The contents of the
    arrays are wrong, so the graph has to show that no result depends on them.
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
