"""Tensors made up in the names, shapes and dtypes of a checkpoint, to time a model that is not there.

The time of a step does not depend on what the numbers are, with two exceptions, and for these the numbers are random:
numbers that are not finite, or so small that a processor takes longer for them, and the choice of experts, which
must fall on all of them alike. (Trained routers prefer some; so steps of a few rows read a little less of a trained
model's weights.) Words of quantised weights are random bits, and their scales are small enough for half precision.

A large tensor repeats a few numbers, for drawing random ones takes longer than reading them: their addresses differ, so
they are read from memory all the same.

Arrays are lazy: none exists before a step needs it.
"""

from collections.abc import Callable
from math import prod

import mlx.core as mx

from splitinfer.core.tensor_info import TensorInfo
from splitinfer.models.building import dtype_of
from splitinfer.models.checkpoint import Checkpoint

_SCALE = 1e-3  # of quantised weights: at 8 bits and 25,000 inputs, sums stay below half precision's largest number
_MIXER = 2654435761  # odd: spreads 24 random bits over 32 (Knuth's multiplicative hash)
_POWERS = (112, 121)  # bytes that are scales of 2**-15 to 2**-7 as E8M0, and finite as E4M3
_SMALL_BYTES = 0x40  # below it, a byte is a finite E4M3 or E5M2 number of at most 2
_MOST = 2**20 - 3  # numbers that are drawn for a tensor: odd, so that no two rows of it are alike

Draw = Callable[[tuple[int, ...]], mx.array]


def made_up(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """A lazy array for every tensor of a checkpoint."""
    keys = mx.random.split(mx.random.key(0), max(1, len(checkpoint.tensors)))
    return {name: _tensor(info, keys[i]) for i, (name, info) in enumerate(checkpoint.tensors.items())}


def _tensor(info: TensorInfo, key: mx.array) -> mx.array:
    dtype, name = dtype_of(info), info.name.rpartition(".")[2]
    if mx.issubdtype(dtype, mx.floating):
        return _repeated(lambda shape: _numbers(name, shape, info.shape, key).astype(dtype), info.shape)
    if dtype == mx.uint32:
        return _repeated(lambda shape: _words(shape, key), info.shape)
    if dtype == mx.uint8:
        low, high = _POWERS if "scale" in name else (0, _SMALL_BYTES)
        return _repeated(lambda shape: mx.random.randint(low, high, shape, key=key).astype(dtype), info.shape)
    return _repeated(lambda shape: mx.random.randint(0, 2, shape, key=key).astype(dtype), info.shape)


def _repeated(draw: Draw, shape: tuple[int, ...]) -> mx.array:
    """An array of a shape; where that is large, of as many numbers as are drawn, again and again."""
    size = prod(shape)
    if size <= _MOST:
        return draw(shape)
    times = -(-size // _MOST)
    return mx.broadcast_to(draw((_MOST,)), (times, _MOST)).reshape(-1)[:size].reshape(shape)


def _words(shape: tuple[int, ...], key: mx.array) -> mx.array:
    few = mx.random.randint(0, 2**24, shape, dtype=mx.uint32, key=key)
    return few * mx.array(_MIXER, dtype=mx.uint32)


def _numbers(name: str, shape: tuple[int, ...], whole: tuple[int, ...], key: mx.array) -> mx.array:
    """Numbers for a tensor of the shape ``whole``."""
    if "scale" in name:
        return mx.random.normal(shape, key=key) * _SCALE
    if len(whole) < 2:  # norms, biases, rates of decay
        return mx.random.uniform(0.5, 1.0, shape, key=key)
    return mx.random.normal(shape, key=key) * mx.array(whole[-1] ** -0.5)
