"""A step's rows as parts of a frame, and back."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.codecs import CODECS, FP16, INT8, Packing
from splitinfer.core.plan import TensorSpec
from splitinfer.errors import ProtocolError
from splitinfer.models.border.hidden_states import PackedRows, ReceivedRows, pack, to_parts, unpack
from splitinfer.models.border.tensors import to_buffer

WIDTH = 200


def hidden(n: int) -> mx.array:
    return mx.random.normal((n, WIDTH), key=mx.random.key(n))


def rounded(codec: str, rows: mx.array) -> mx.array:
    return unpack(codec, pack(codec, rows)[1], rows.dtype)


def arrives(rows: mx.array, packed: PackedRows | None) -> mx.array:
    out = to_parts(rows, packed)
    assert out.spec is not None
    return ReceivedRows(out.spec, out.packing, out.parts).array()


@pytest.mark.parametrize("codec", CODECS)
@given(which=st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
def test_each_row_in_its_place(codec: str, which: list[bool]):
    rows = hidden(len(which))
    packed = PackedRows.of(codec, rows, [at for at, is_packed in enumerate(which) if is_packed])
    expected = mx.where(mx.array(which)[:, None], rounded(codec, rows), rows)
    assert mx.array_equal(arrives(rows, packed), expected)


@pytest.mark.parametrize("bad", [[1, 2], [0, 1, 2, 3]])
def test_a_step_with_rows_that_do_not_fit_goes_as_it_is(bad: list[int]):
    rows = hidden(6)
    for row in bad:
        rows[row, 7] = 1e6
    packed = PackedRows.of(FP16, rows, [0, 1, 2, 3])
    out = to_parts(rows, packed)
    assert out.num_unfit == len(bad)
    assert mx.array_equal(arrives(rows, packed), rows)


def bits(array: mx.array) -> bytes:
    return bytes(to_buffer(array))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_finished_step_is_sent_without_the_device(dtype: mx.Dtype, busy: Callable[[], AbstractContextManager[None]]):
    """Rows that do not fit may not wait for the step launched meanwhile."""
    rows = hidden(8)
    rows[4, 3] = math.inf
    rows = rows.astype(dtype)
    packed = PackedRows.of(INT8, rows, [2, 4, 5])
    mx.eval(rows, packed.arrays())
    with busy():
        out = to_parts(rows, packed)
    assert out.spec == TensorSpec(str(dtype).removeprefix("mlx.core."), (8, WIDTH))
    assert out.num_unfit == 1
    assert bits(ReceivedRows(out.spec, out.packing, out.parts).array()) == bits(rows)


def test_frames_that_contradict_their_step():
    rows = hidden(6)
    out = to_parts(rows, PackedRows.of(INT8, rows, [1, 2]))
    assert out.spec is not None
    assert out.packing is not None
    wrong_spec = (
        (TensorSpec("float32", (6,)), out.packing),
        (TensorSpec("float32", (2, WIDTH)), out.packing),
        (TensorSpec("float32", (7, WIDTH)), out.packing),
        (TensorSpec("float32", (6, WIDTH + 1)), out.packing),
        (TensorSpec("float32", (6, 1 << 20)), out.packing),
        (TensorSpec("int32", (6, WIDTH)), out.packing),
        (TensorSpec("float16", (6, WIDTH)), out.packing),
        (out.spec, Packing(INT8, ((1, 4),))),
        (out.spec, Packing(FP16, ((1, 3),))),
        (out.spec, None),
    )
    for spec, packing in wrong_spec:
        with pytest.raises(ProtocolError):
            ReceivedRows(spec, packing, out.parts).array()
    for parts in ((), out.parts[:1], out.parts[1:], (*out.parts, out.parts[0])):
        with pytest.raises(ProtocolError):
            ReceivedRows(out.spec, out.packing, parts).array()
