"""What it takes to write hidden states in fewer bits and read them again, timed here on random ones.

The arithmetic is the least that such a codec has to do: a scale for each block of values, rounding, and back. Both ends
are taken to be as quick as this machine.
"""

import time
from collections.abc import Callable

import mlx.core as mx

from splitinfer.doctor.advice import Codec, Hidden

_ROWS, _BLOCK, _TRIALS = 128, 64, 5
_SCALE_BYTES = 2 / _BLOCK

Way = Callable[[mx.array], mx.array]  # there and back


def codecs(hidden: Hidden) -> list[Codec]:
    """Each of them, for rows of that width."""
    width = max(_BLOCK, hidden.values // _BLOCK * _BLOCK)
    dtype = mx.float32 if hidden.bytes_per_value == 4 else mx.bfloat16
    rows = mx.random.normal((_ROWS, width)).astype(dtype)
    mx.eval(rows)
    return [
        Codec("fp16", 2, _seconds_per_value(_fp16, rows)),
        Codec("fp8", 1 + _SCALE_BYTES, _seconds_per_value(_fp8, rows)),
        Codec("int8", 1 + _SCALE_BYTES, _seconds_per_value(_int8, rows)),
    ]


def _seconds_per_value(way: Way, rows: mx.array) -> float:
    mx.eval(way(rows))
    times = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        mx.eval(way(rows))
        times.append(time.perf_counter() - began)
    return sorted(times)[_TRIALS // 2] / rows.size


def _fp16(rows: mx.array) -> mx.array:
    return rows.astype(mx.float16).astype(rows.dtype)


def _int8(rows: mx.array) -> mx.array:
    blocks, scale = _scaled(rows, 127.0)
    return _unscaled(mx.round(blocks / scale).astype(mx.int8), scale, rows)


def _fp8(rows: mx.array) -> mx.array:
    blocks, scale = _scaled(rows, 448.0)
    return _unscaled(mx.from_fp8(mx.to_fp8(blocks / scale), dtype=mx.float32), scale, rows)


def _scaled(rows: mx.array, most: float) -> tuple[mx.array, mx.array]:
    blocks = rows.astype(mx.float32).reshape(rows.shape[0], -1, _BLOCK)
    largest = mx.maximum(mx.abs(blocks).max(axis=-1, keepdims=True), 1e-12)
    return blocks, (largest / most).astype(mx.float16)


def _unscaled(coded: mx.array, scale: mx.array, like: mx.array) -> mx.array:
    return (coded.astype(mx.float32) * scale).reshape(like.shape).astype(like.dtype)
