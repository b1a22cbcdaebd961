"""Rows in fewer bytes: how far off they are when they come back, and what cannot be packed."""

import math

import mlx.core as mx
import numpy as np
import pytest

from splitinfer.core.codecs import CODECS, FP8, FP16, INT8, columns
from splitinfer.models.border.hidden_states import columns_of, pack, unpack

WIDTHS = [64, 200, 1024]
MOST_OFF = {FP16: 5e-4, FP8: 4e-2, INT8: 1.2e-2}  # of a row's root mean square, on values of like size


def normal(n: int, width: int, seed: int = 1) -> mx.array:
    return mx.random.normal((n, width), key=mx.random.key(seed))


def massive(n: int, width: int) -> mx.array:
    """Rows as models have them: some channels always large, and one value that is enormous."""
    rows = normal(n, width)
    rows[:, 3] *= 50
    rows[:, width // 2] *= 50
    rows[:, 5] += 2000
    return rows


def there_and_back(codec: str, rows: mx.array) -> mx.array:
    fits, arrays = pack(codec, rows)
    assert all(fits.tolist())
    for array, column in zip(arrays, columns(codec, rows.shape[1]), strict=True):
        assert array.shape == (rows.shape[0], column.width)
        assert str(array.dtype) == f"mlx.core.{column.dtype}"
    return unpack(codec, arrays, rows.dtype)


def off(back: mx.array, rows: mx.array) -> float:
    """The root mean square of the error, relative to the rows'."""
    error, size = (back - rows).astype(mx.float32), rows.astype(mx.float32)
    return math.sqrt(mx.square(error).mean().item() / mx.square(size).mean().item())


@pytest.mark.parametrize(
    ("width", "dtype"), [*((width, mx.float32) for width in WIDTHS), (256, mx.bfloat16), (256, mx.float16)], ids=str
)
@pytest.mark.parametrize("codec", CODECS)
def test_little_is_lost(codec: str, width: int, dtype: mx.Dtype):
    rows = normal(20, width).astype(dtype)
    back = there_and_back(codec, rows)
    assert back.dtype == dtype
    assert off(back, rows) < MOST_OFF[codec] + (0 if dtype == mx.float32 else 2e-3)
    assert dtype != mx.float32 or off(back, rows) > 0


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_not_massive_survive_those_that_are(codec: str):
    rows = massive(20, 1024)
    back = there_and_back(codec, rows)
    usual = np.setdiff1d(np.arange(1024), [3, 5, 512])
    quiet = mx.array(usual)
    assert off(back[:, quiet], rows[:, quiet]) < MOST_OFF[codec]


def test_the_largest_eight_are_exact_in_int8():
    rows = massive(5, 1024)
    back = there_and_back(INT8, rows)
    places = mx.argsort(-mx.abs(rows), axis=-1)[:, :8]
    assert mx.array_equal(mx.take_along_axis(back, places, axis=-1), mx.take_along_axis(rows, places, axis=-1))


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_and_tiny_values(codec: str):
    rows = mx.zeros((3, 128))
    rows[1] = 1e-38
    rows[2, 7] = 1e-20
    back = there_and_back(codec, rows)
    assert mx.isfinite(back).all().item()
    assert mx.array_equal(back[0], rows[0])
    assert mx.abs(back).max().item() <= 1.1e-20


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_no_number_goes_as_it_is(codec: str):
    rows = normal(4, 64)
    rows[1, 3], rows[2, 4] = math.inf, math.nan
    assert pack(codec, rows)[0].tolist() == [True, False, False, True]


def sent(codec: str, rows: mx.array) -> list[memoryview]:
    return [memoryview(np.array(array)).cast("B") for array in pack(codec, rows)[1]]


def test_a_spike_where_there_is_nothing():
    """Or a write beyond the row, into another's memory."""
    parts = sent(INT8, normal(2, 64))
    parts[3] = memoryview(np.full((2, 8), 64, np.uint16)).cast("B")
    with pytest.raises(ValueError, match="at 64 of 64"):
        columns_of(INT8, 2, 64, parts)
