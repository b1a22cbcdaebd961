"""Converts a step's rows of hidden states to the parts of a frame for a link, and back.

    rows of a step      [ decode | prompt, packed .......... | decode ]
    parts of its frame  [ decode, decode ]  [ codes ]  [ scales ] ...

The step's message says which rows are packed (``pack``), so the receiver needs only the frame. Packing is part of the
step's graph. If rows of a finished step do not fit the codec, the host works in the arrays' buffers: an operation on
the device would wait for the step that was launched meanwhile.
"""

import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from splitinfer.core.codecs import FP8, FP16, GROUP, INT8, SPIKES, Column, Packing, columns, runs_of
from splitinfer.core.plan import TensorSpec
from splitinfer.errors import ProtocolError
from splitinfer.models.border.tensors import dtype_of, from_buffer, numbers_of, spec_of, to_buffer

_MOST_FP16 = 65504.0
_MOST_E4M3 = 448.0
_MOST_INT8 = 127.0
_LEAST_SCALE = 1e-30  # scale of a group of zeros, to avoid a division by zero
_ROWS, _TRIALS = 256, 3  # packed and unpacked to time a codec

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The packed rows of a step. ``rows``: their indices, ascending. ``fits``: whether each fits the codec, bool [n].
    ``columns``: their arrays. ``rest``: all other rows, [m, d], or ``None``."""

    codec: str
    rows: tuple[int, ...]
    fits: mx.array
    columns: Arrays
    rest: mx.array | None

    @classmethod
    def of(cls, codec: str, hidden: mx.array, rows: Seq[int]) -> "PackedRows":
        """Pack ``rows`` of ``hidden`` [T, d]. Computes nothing yet."""
        others = _others(hidden.shape[0], rows)
        fits, columns = pack(codec, _rows_of(hidden, rows) if others else hidden)
        rest = mx.contiguous(_rows_of(hidden, others)) if others else None
        return cls(codec, tuple(rows), fits, tuple(map(mx.contiguous, columns)), rest)

    def arrays(self) -> list[mx.array]:
        """Return the arrays that must be evaluated."""
        return [self.fits, *self.columns, *([] if self.rest is None else [self.rest])]


class Sent(NamedTuple):
    """A frame's parts and how to read them. ``num_unfit``: how many rows the codec could not represent."""

    spec: TensorSpec | None
    packing: Packing | None
    parts: tuple[memoryview, ...]
    num_unfit: int


def to_parts(hidden: mx.array | None, packed: PackedRows | None) -> Sent:
    """Return the frame's parts for a step's evaluated rows [T, d]. No row is packed if one does not fit the codec."""
    if hidden is None:
        return Sent(None, None, (), 0)
    num_unfit = 0 if packed is None else numbers_of(packed.fits).count(False)
    if packed is None or num_unfit:
        return Sent(spec_of(hidden), None, (to_buffer(hidden),), num_unfit)
    rest = () if packed.rest is None else (packed.rest,)
    packing = Packing(packed.codec, runs_of(packed.rows))
    return Sent(spec_of(hidden), packing, tuple(map(to_buffer, (*rest, *packed.columns))), 0)


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """The received rows [T, d] of a step: ``spec`` and ``packing`` from its message, ``parts`` from its frame."""

    spec: TensorSpec
    packing: Packing | None
    parts: tuple[memoryview, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [T, d] of the rows."""
        return self.spec.shape

    @property
    def buffer(self) -> memoryview | None:
        """The rows as bytes, or ``None`` if some are packed."""
        return self.parts[0].cast("B") if self.packing is None and len(self.parts) == 1 else None

    def array(self) -> mx.array:
        """Return the rows, copied into MLX's memory.

        Raises:
            ProtocolError: the parts do not match the message.
        """
        spec, packing, parts = self.spec, self.packing, self.parts
        if packing is None:
            if len(parts) != 1:
                raise ProtocolError(f"hidden states came in {len(parts)} parts, where there should be one")
            return from_buffer(spec, parts[0])
        if len(spec.shape) != 2 or packing.end > spec.shape[0]:
            raise ProtocolError(f"the peer sent hidden states {spec.shape} with packed rows up to {packing.end}")
        num_rows, width = spec.shape
        num_rest = num_rows - packing.num_rows
        rest, packed = (parts[:1], parts[1:]) if num_rest else ((), parts)
        try:
            arrays = columns_of(packing.codec, packing.num_rows, width, list(packed))
            dtype = dtype_of(spec.dtype)
        except ValueError as error:
            raise ProtocolError(f"the peer sent packed hidden states that cannot be read: {error}") from error
        unpacked = unpack(packing.codec, tuple(map(mx.array, arrays)), dtype)
        if not num_rest:
            return unpacked
        return _joined(packing, num_rows, from_buffer(TensorSpec(spec.dtype, (num_rest, width)), rest[0]), unpacked)


def _joined(packing: Packing, num_rows: int, rest: mx.array, unpacked: mx.array) -> mx.array:
    """Return the rows of ``rest`` and ``unpacked`` in the order of the step."""
    found, at = list[mx.array](), {False: 0, True: 0}
    for is_packed, count in packing.pieces(num_rows):
        start = at[is_packed]
        at[is_packed] = start + count
        found.append((unpacked if is_packed else rest)[start : start + count])
    return mx.concatenate(found)


def _others(num_rows: int, rows: Seq[int]) -> list[int]:
    """Return the rows in [0, num_rows) that are not in ``rows``."""
    excluded = set(rows)
    return [row for row in range(num_rows) if row not in excluded]


def _rows_of(array: mx.array, rows: Seq[int]) -> mx.array:
    return array[mx.array(list(rows), dtype=mx.int32)]


# -- codecs ----------------------------------------------------------------------------------------
#
# ``core.codecs`` defines them and says why. A row's bytes do not depend on its neighbours, so chunks and batches do
# not matter. Arithmetic is in float32 for rows of any dtype: a scale in bfloat16 would nearly double int8's error.


def pack(codec: str, rows: mx.array) -> tuple[mx.array, Arrays]:
    """Return whether each row fits the codec, bool [n], and ``rows`` [n, d] as the arrays of ``columns(codec, d)``,
    each [n, width]. A row does not fit if a value is not finite or beyond the codec's range."""
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
    """Return the rows [n, d] of ``dtype`` from the arrays that ``pack`` returned."""
    if codec == FP16:
        return arrays[0].astype(mx.float32).astype(dtype)
    if codec == FP8:
        return _unscaled(mx.from_fp8(arrays[0], mx.float32), arrays[1]).astype(dtype)
    codes, scales, spikes, places = arrays
    rest = _unscaled(codes.astype(mx.float32), scales)
    return mx.put_along_axis(rest, places.astype(mx.uint32), spikes, axis=-1).astype(dtype)


def seconds_per_row(codec: str, row: TensorSpec) -> float:
    """Return the median seconds that this machine takes to pack and unpack a row, many at once."""
    dtype = dtype_of(row.dtype)
    rows = mx.random.normal((_ROWS, prod(row.shape))).astype(dtype)
    mx.eval(rows)
    found = []
    for _ in range(_TRIALS + 1):  # the first compiles kernels
        began = time.perf_counter()
        mx.eval(unpack(codec, pack(codec, rows)[1], dtype))
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]) / _ROWS


def columns_of(codec: str, num_rows: int, width: int, parts: list[memoryview]) -> list[np.ndarray]:
    """Return the arrays of packed rows that a peer sent, without copying.

    Raises:
        ValueError: the parts' sizes do not match ``num_rows`` rows, or a spike's place is beyond ``width``.
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
    """Return [n, groups, GROUP]: each row cut into groups, the last group padded with zeros."""
    n, width = rows.shape
    padding = -width % GROUP
    if padding:
        rows = mx.pad(rows, [(0, 0), (0, padding)])
    return rows.reshape(n, -1, GROUP)


def _scaled(rows: mx.array, most: float) -> tuple[mx.array, mx.array]:
    """Return each group divided by its scale, so that its largest value is ``most``, and the scales."""
    groups = _groups(rows)
    scales = mx.maximum(mx.abs(groups).max(axis=-1) / most, _LEAST_SCALE)
    scaled = mx.clip(groups / scales[..., None], -most, most)
    return scaled.reshape(rows.shape[0], -1)[:, : rows.shape[1]], scales


def _unscaled(rows: mx.array, scales: mx.array) -> mx.array:
    groups = _groups(rows) * scales[..., None]
    return groups.reshape(rows.shape[0], -1)[:, : rows.shape[1]]
