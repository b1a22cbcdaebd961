"""Hidden states as bytes: every bit comes back, and bytes that do not fit are refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np
import pytest

from splitinfer.core.plan import TensorSpec
from splitinfer.errors import ProtocolError
from splitinfer.models.border.tensors import from_buffer, spec_of, to_buffer

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16))


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_comes_back(name: str):
    """All bit patterns of the 16-bit types, and a sample of float32's: not-a-numbers and subnormals too."""
    width = np.dtype(BITS[name]).itemsize
    count = 2**16
    raw = np.arange(count, dtype=np.uint32) if width == 2 else np.arange(count, dtype=np.uint32) * 65_537
    array = mx.array(raw.astype(BITS[name]).reshape(256, 256)).view(DTYPES[name])
    spec = spec_of(array)
    assert spec == TensorSpec(name, (256, 256))
    sent = bytes(to_buffer(array))
    assert len(sent) == count * width
    assert sent == raw.astype(BITS[name]).tobytes()
    again = from_buffer(spec, memoryview(sent))
    assert again.dtype == array.dtype
    assert (bits(again) == bits(array)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_views_are_sent_as_they_are_seen(name: str):
    whole = mx.arange(24).reshape(4, 6).astype(DTYPES[name])
    for view in (whole.T, whole[:, 1:4], whole[::2], whole[1:2], mx.broadcast_to(whole[:1], (3, 6)), whole + 1):
        assert mx.array_equal(from_buffer(spec_of(view), to_buffer(view)), view)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_is_computed_is_sent_without_asking_the_device(
    dtype: mx.Dtype, busy: Callable[[], AbstractContextManager[None]]
):
    array = (mx.arange(24).reshape(2, 3, 4) + 1).astype(dtype)
    turned = array.T
    mx.eval(array, turned)
    with busy():
        assert to_buffer(array).nbytes == to_buffer(turned).nbytes == array.nbytes
    one, two = (np.frombuffer(to_buffer(array), np.uint8).ctypes.data for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (TensorSpec("float32", (2, 3)), 23),
        (TensorSpec("float32", (2, 3)), 25),
        (TensorSpec("bfloat16", (2, 3)), 24),
        (TensorSpec("float32", (0, 3)), 0),
        (TensorSpec("float32", (-2, -3)), 24),
        (TensorSpec("float32", (2, -3)), 24),
        (TensorSpec("float32", (2**40, 2**40)), 0),  # a product of 2**80 is no multiple of 2**64 in Python
        (TensorSpec("float32", (2**32, 2**32, 2)), 0),
        (TensorSpec("float16", (2**64 - 1,)), 0),
        (TensorSpec("int32", (2, 3)), 24),
        (TensorSpec("float64", (2, 3)), 48),
        (TensorSpec("", (2, 3)), 24),
    ],
)
def test_bytes_that_do_not_fit_are_refused(spec: TensorSpec, num_bytes: int):
    with pytest.raises(ProtocolError, match="the peer sent"):
        from_buffer(spec, bytes(num_bytes))
