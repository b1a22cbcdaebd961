"""Converts arrays to raw buffers and back, without a copy that can be avoided.

Sending: the buffer of an evaluated, contiguous array is its memory. Receiving: one copy, into MLX's memory (bfloat16 as
16-bit integers, which numpy knows). An operation on the device would wait for every step launched before it, so what is
sent of a finished step is read in its buffer, by the host.
"""

from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from splitinfer.core.plan import TensorSpec
from splitinfer.errors import ProtocolError

_HIDDEN: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""The dtypes of hidden states, by MLX's names, each with that in which numpy reads it."""


def dtype_of(name: str) -> mx.Dtype:
    """Return the dtype of hidden states, by MLX's name.

    Raises:
        ValueError: a dtype that hidden states do not have.
    """
    if name not in _HIDDEN:
        raise ValueError(f"hidden states cannot be {name!r:.20}; known are {', '.join(_HIDDEN)}")
    return mlx_dtype(name)


def mlx_dtype(name: str) -> mx.Dtype:
    """Return any dtype by MLX's name.

    Raises:
        ValueError: an unknown one.
    """
    found = getattr(mx, "bool_" if name == "bool" else name, None)
    if not isinstance(found, mx.Dtype):
        raise ValueError(f"unknown dtype {name!r:.20}")
    return found


def spec_of(array: mx.array) -> TensorSpec:
    """Return the dtype and shape with which a peer reads ``array``'s bytes."""
    return TensorSpec(name_of(array.dtype), tuple(array.shape))


def name_of(dtype: mx.Dtype) -> str:
    """Return MLX's name of a dtype."""
    return str(dtype).removeprefix("mlx.core.")


def to_buffer(array: mx.array) -> memoryview:
    """Return the bytes of an array, row-major. Evaluates it; the array lives as long as the view.

    An array that is computed costs no operation on the device: on a GPU that would wait for the step launched
    meanwhile. The host copies one that is not row-major.
    """
    view = memory_of(array)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def on_host(array: mx.array) -> NDArray[Any]:
    """Return the numbers of an evaluated array, of any dtype but bfloat16, where they are; the array lives as long."""
    return np.asarray(memory_of(array))


def memory_of(array: mx.array) -> memoryview:
    """Return the memory of an array. All that a finished step brought is read here; an emulated accelerator may watch
    it."""
    return memoryview(cast(Any, array))  # MLX's stubs lack the buffer protocol


def from_buffer(spec: TensorSpec, buffer: memoryview | bytes) -> mx.array:
    """Return the hidden states a peer sent, copied.

    Raises:
        ProtocolError: a dtype that hidden states do not have, or bytes that do not fill the shape exactly.
    """
    if spec.dtype not in _HIDDEN:
        raise ProtocolError(f"the peer sent hidden states as {spec.dtype}; known are {', '.join(_HIDDEN)}")
    dtype = mlx_dtype(spec.dtype)
    wanted = prod(spec.shape) * dtype.size
    if any(n <= 0 for n in spec.shape) or memoryview(buffer).nbytes != wanted:
        raise ProtocolError(
            f"the peer sent {memoryview(buffer).nbytes} bytes for hidden states {spec.shape} of {wanted}"
        )
    array = mx.array(np.frombuffer(buffer, _HIDDEN[spec.dtype]).reshape(spec.shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array
