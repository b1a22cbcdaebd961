"""What is done at layers besides calling them: keeping their hidden states, adding what pictures bring for them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from splitinfer.errors import ModelError
from splitinfer.models.layers import floating_arrays
from splitinfer.models.stand_ins import Relay, Watch


def tapping(relay: Relay, part: Callable[[mx.array], mx.array], model: str) -> Watch:
    """A watch that keeps what ``part`` makes of the hidden states behind a layer."""

    def watch(layer: Any, args: Any, kwargs: Any) -> Any:
        result = layer(*args, **kwargs)
        arrays = [array for _, array in floating_arrays(result)]
        if len(arrays) != 1 or arrays[0].ndim != 3:
            raise ModelError(f"draft: the hidden states of {model} are not in rows")
        relay.tapped.append(part(arrays[0].reshape(-1, arrays[0].shape[-1])))
        return result

    return watch


def adding(relay: Relay, index: int) -> Watch:
    """A watch that adds to a layer's result what pictures bring for it."""

    def watch(layer: Any, args: Any, kwargs: Any) -> Any:
        result = layer(*args, **kwargs)
        return result + relay.deep[index] if relay.deep else result

    return watch
