"""Converts arrays to raw buffers and back, without a copy that can be avoided.

Sending: the buffer of an evaluated, contiguous array is its memory. Receiving: one copy, into MLX's memory (bfloat16 as
16-bit integers, which numpy knows). An operation on the device would wait for every step launched before it, so the
host reads a finished step's results in their buffers.
"""

from functools import cache
from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np

from splitinfer.core.plan import TensorSpec
from splitinfer.errors import ProtocolError

_HIDDEN: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""The dtypes of hidden states by MLX's names, each with the dtype that numpy reads them as."""


def dtype_of(name: str) -> mx.Dtype:
    """Return the dtype of hidden states with MLX's ``name``.

    Raises:
        ValueError: hidden states cannot have this dtype.
    """
    if name not in _HIDDEN:
        raise ValueError(f"hidden states cannot be {name!r:.20}; known are {', '.join(_HIDDEN)}")
    return mlx_dtype(name)


def mlx_dtype(name: str) -> mx.Dtype:
    """Return any dtype by MLX's name.

    Raises:
        ValueError: the name is unknown.
    """
    found = getattr(mx, "bool_" if name == "bool" else name, None)
    if not isinstance(found, mx.Dtype):
        raise ValueError(f"unknown dtype {name!r:.20}")
    return found


def spec_of(array: mx.array) -> TensorSpec:
    """Return the dtype and shape that a peer needs to read ``array``'s bytes."""
    return TensorSpec(name_of(array.dtype), tuple(array.shape))


@cache
def name_of(dtype: mx.Dtype) -> str:
    """Return MLX's name of a dtype."""
    return str(dtype).removeprefix("mlx.core.")


def to_buffer(array: mx.array) -> memoryview:
    """Return the bytes of an array, row-major. Evaluates it. The array lives as long as the view.

    An evaluated array needs no operation on the device, which would wait there for the step launched meanwhile. If it
    is not row-major, the host copies it.
    """
    view = memory_of(array)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def numbers_of(array: mx.array) -> list[Any]:
    """Return the numbers of an evaluated array (any dtype but bfloat16), as nested lists."""
    return memory_of(array).tolist()


def memory_of(array: mx.array) -> memoryview:
    """Return the memory of an array. All reads of a step's results go through here: an emulated accelerator may
    watch."""
    return memoryview(cast(Any, array))  # MLX's stubs lack the buffer protocol


def from_buffer(spec: TensorSpec, buffer: memoryview | bytes) -> mx.array:
    """Return a copy of the hidden states that a peer sent.

    Raises:
        ProtocolError: hidden states cannot have this dtype, or the bytes do not fill the shape exactly.
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
