"""Tensors made up in the names, shapes and dtypes of a checkpoint, to time a model that is not there.

The time of a step does not depend on what the numbers are, with two exceptions, and for these the numbers are random:
numbers that are not finite, or so small that a processor takes longer for them, and the choice of experts, which
must fall on all of them alike. (Trained routers prefer some; so steps of a few rows read a little less of a trained
model's weights.) Words of quantised weights are random bits, and their scales are small enough for half precision.

Arrays are lazy: none exists before a step needs it.
"""

import mlx.core as mx

from splitinfer.models.checkpoint import Checkpoint, TensorInfo
from splitinfer.models.loader import dtype_of

_SCALE = 1e-3  # of quantised weights: at 8 bits and 25,000 inputs, sums stay below half precision's largest number
_MIXER = 2654435761  # odd: spreads 24 random bits over 32 (Knuth's multiplicative hash)
_POWERS = (112, 121)  # bytes that are scales of 2**-15 to 2**-7 as E8M0, and finite as E4M3
_SMALL_BYTES = 0x40  # below it, a byte is a finite E4M3 or E5M2 number of at most 2


def made_up(checkpoint: Checkpoint, seed: int = 0) -> dict[str, mx.array]:
    """A lazy array for every tensor of a checkpoint."""
    keys = mx.random.split(mx.random.key(seed), max(1, len(checkpoint.tensors)))
    return {name: _tensor(info, keys[i]) for i, (name, info) in enumerate(checkpoint.tensors.items())}


def _tensor(info: TensorInfo, key: mx.array) -> mx.array:
    dtype, name = dtype_of(info), info.name.rpartition(".")[2]
    if mx.issubdtype(dtype, mx.floating):
        return _numbers(name, info.shape, key).astype(dtype)
    if dtype == mx.uint32:
        few = mx.random.randint(0, 2**24, info.shape, dtype=mx.uint32, key=key)
        return few * mx.array(_MIXER, dtype=mx.uint32)
    if dtype == mx.uint8:
        low, high = _POWERS if "scale" in name else (0, _SMALL_BYTES)
        return mx.random.randint(low, high, info.shape, key=key).astype(dtype)
    return mx.random.randint(0, 2, info.shape, key=key).astype(dtype)


def _numbers(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    if "scale" in name:
        return mx.random.normal(shape, key=key) * _SCALE
    if len(shape) < 2:  # norms, biases, rates of decay
        return mx.random.uniform(0.5, 1.0, shape, key=key)
    return mx.random.normal(shape, key=key) * mx.array(shape[-1] ** -0.5)
