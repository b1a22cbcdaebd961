"""Tensors made up in the names, shapes and dtypes of a checkpoint, to time a model that is not there.

The time of a step does not depend on what the numbers are, but for the choice of experts, which must fall on all of
them alike: so floating-point numbers are random, and so small that no sum overflows half precision. Words of quantised
weights are zeros, and what they stand for is as random as their biases. (Trained routers prefer some experts; so steps
of a few rows read a little less of a trained model's weights.)

A large tensor repeats a few numbers, for drawing random ones takes longer than reading them: their addresses differ, so
they are read from memory all the same. Arrays are lazy: none exists before a step needs it.
"""

from math import prod

import mlx.core as mx

from splitinfer.core.tensor_info import TensorInfo
from splitinfer.models.building import dtype_of
from splitinfer.models.checkpoint import Checkpoint

_FEW = 2**20 - 3  # numbers that are drawn: odd, so that no two rows of a tensor are alike
_SMALL = 0.02


def made_up(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """A lazy array for every tensor of a checkpoint."""
    few = mx.random.uniform(-_SMALL, _SMALL, (_FEW,), key=mx.random.key(0))
    return {name: _tensor(info, few) for name, info in checkpoint.tensors.items()}


def _tensor(info: TensorInfo, few: mx.array) -> mx.array:
    dtype, size = dtype_of(info), prod(info.shape)
    if not mx.issubdtype(dtype, mx.floating):
        return mx.zeros(info.shape, dtype)
    many = mx.broadcast_to(few.astype(dtype), (-(-size // _FEW), _FEW)).reshape(-1)
    return many[:size].reshape(info.shape)
