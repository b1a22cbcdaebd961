"""Packs rows of hidden states into fewer bytes, and unpacks them (``core.wire_codec`` defines the codecs, and why).

Each row is packed by itself: no row's bytes depend on its neighbours, so chunks and batches do not matter. Arithmetic
is in float32 for rows of any dtype: a scale in bfloat16 would nearly double int8's error. Packing is lazy, part of a
step's graph, and computed with it.
"""

import statistics
import time
from math import prod

import mlx.core as mx
import numpy as np

from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import FP8, FP16, GROUP, INT8, SPIKES, Column, columns
from splitinfer.models.tensors import dtype_of

_MOST_FP16 = 65504.0
_MOST_E4M3 = 448.0
_MOST_INT8 = 127.0
_LEAST_SCALE = 1e-30  # of a group of zeros, so that nothing is divided by zero
_ROWS, _TRIALS = 256, 3  # packed and unpacked to see how long it takes

Arrays = tuple[mx.array, ...]


def pack(codec: str, rows: mx.array) -> tuple[mx.array, Arrays]:
    """Whether each row fits the codec, bool [n]; and ``rows`` [n, d] as the arrays of ``columns(codec, d)``, each
    [n, width]. Rows with values that are not finite, or beyond the codec's range, do not fit."""
    exact = rows.astype(mx.float32)
    most = mx.abs(exact).max(axis=-1)
    if codec == FP16:
        return most <= _MOST_FP16, (exact.astype(mx.float16),)
    fits = mx.isfinite(most)
    if codec == FP8:
        scaled, scales = _scaled(exact, _MOST_E4M3)
        return fits, (mx.to_fp8(scaled), scales)
    assert codec == INT8
    count = min(SPIKES, rows.shape[-1])
    places = mx.argpartition(-mx.abs(exact), kth=count - 1, axis=-1)[:, :count]
    spikes = mx.take_along_axis(exact, places, axis=-1)
    rest = mx.put_along_axis(exact, places, mx.zeros_like(spikes), axis=-1)
    scaled, scales = _scaled(rest, _MOST_INT8)
    return fits, (mx.round(scaled).astype(mx.int8), scales, spikes, places.astype(mx.uint16))


def unpack(codec: str, arrays: Arrays, dtype: mx.Dtype) -> mx.array:
    """Rows [n, d] of ``dtype`` from the arrays that ``pack`` returned."""
    if codec == FP16:
        return arrays[0].astype(mx.float32).astype(dtype)
    if codec == FP8:
        return _unscaled(mx.from_fp8(arrays[0], mx.float32), arrays[1]).astype(dtype)
    codes, scales, spikes, places = arrays
    rest = _unscaled(codes.astype(mx.float32), scales)
    return mx.put_along_axis(rest, places.astype(mx.uint32), spikes, axis=-1).astype(dtype)


def seconds_per_row(codec: str, row: TensorSpec, num_rows: int = _ROWS) -> float:
    """Seconds for packing and unpacking a row on this machine, ``num_rows`` at once; the median of some trials."""
    dtype = dtype_of(row.dtype)
    rows = mx.random.normal((num_rows, prod(row.shape))).astype(dtype)
    mx.eval(rows)
    found = []
    for _ in range(_TRIALS + 1):  # the first compiles kernels
        began = time.perf_counter()
        mx.eval(unpack(codec, pack(codec, rows)[1], dtype))
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]) / num_rows


def columns_of(codec: str, num_rows: int, width: int, parts: list[memoryview]) -> list[np.ndarray]:
    """The arrays of packed rows that a peer sent, not copied.

    Raises:
        ValueError: the parts do not have the sizes for ``num_rows`` rows, or a spike's place is beyond ``width``.
    """
    wanted = columns(codec, width)
    if len(parts) != len(wanted):
        raise ValueError(f"{len(parts)} arrays came for rows packed in {len(wanted)}")
    found = [_column(part, column, num_rows) for part, column in zip(parts, wanted, strict=True)]
    if codec == INT8 and int(found[3].max()) >= width:
        raise ValueError(f"a value is placed at {found[3].max()} of {width}")
    return found


def _column(part: memoryview, column: Column, num_rows: int) -> np.ndarray:
    if part.nbytes != num_rows * column.bytes_per_row:
        raise ValueError(f"{part.nbytes} bytes came for {num_rows} rows of {column.width} {column.dtype}")
    return np.frombuffer(part, column.dtype).reshape(num_rows, column.width)


def _groups(rows: mx.array) -> mx.array:
    """[n, groups, GROUP]: each row in groups, the last padded with zeros."""
    n, width = rows.shape
    padding = -width % GROUP
    if padding:
        rows = mx.pad(rows, [(0, 0), (0, padding)])
    return rows.reshape(n, -1, GROUP)


def _scaled(rows: mx.array, most: float) -> tuple[mx.array, mx.array]:
    """Each group divided by its scale, which makes its largest value ``most``; and the scales."""
    groups = _groups(rows)
    scales = mx.maximum(mx.abs(groups).max(axis=-1) / most, _LEAST_SCALE)
    scaled = mx.clip(groups / scales[..., None], -most, most)
    return scaled.reshape(rows.shape[0], -1)[:, : rows.shape[1]], scales


def _unscaled(rows: mx.array, scales: mx.array) -> mx.array:
    groups = _groups(rows) * scales[..., None]
    return groups.reshape(rows.shape[0], -1)[:, : rows.shape[1]]
