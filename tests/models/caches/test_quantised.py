"""Keys and values in few bits: what is stored, what attention makes of it, and that rows do not know of each other."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask
from stages import loaded
from tiny import Folder

from splitinfer.core.kv.format import FORMATS
from splitinfer.models.caches import quantised, rows
from splitinfer.models.caches.caches import arrays_of
from splitinfer.models.caches.quantised import QuantisedKVCache, attention, group_size
from splitinfer.models.rows.kv_trial import off_by
from splitinfer.system.gpu_roads import Road


def numbers(*shape: int, seed: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def test_groups_divide_heads():
    assert [group_size(dim) for dim in (64, 128, 192, 32, 96)] == [64, 64, 64, 32, 32]


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize(("name", "bits"), [("k8v8", 18), ("k8v4", 14)])
def test_bytes(name: str, bits: int, dim: int):
    """8 bits and one for the scales, of 32: 0.281 of float32, 0.5625 of bfloat16."""
    cache = QuantisedKVCache(FORMATS[name])
    cache.update_and_fetch(numbers(1, 2, 256, dim), numbers(1, 2, 256, dim))
    mx.eval(cache.state)
    assert sum(array.nbytes for array in arrays_of(cache)) * 8 == bits * 2 * 256 * dim


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("bits", "error"), [(8, 0.008), (4, 0.12)])
def test_the_error_is_that_of_the_bits(bits: int, error: float, dtype: mx.Dtype):
    """In half precision, too: the scales are not rounded."""
    cache = QuantisedKVCache(FORMATS["k8v8" if bits == 8 else "k8v4"])
    values = numbers(1, 2, 50, 64, dtype=dtype)
    _, packed = cache.update_and_fetch(values, values)
    assert packed.shape == values.shape
    assert packed.numbers().dtype == dtype
    off = mx.linalg.norm((packed.numbers() - values).astype(mx.float32)) / mx.linalg.norm(values.astype(mx.float32))
    assert 0.1 * error < off.item() < error


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_words_are_products_with_their_numbers(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    """What a GPU does for few rows, against making numbers first."""
    cache = QuantisedKVCache(FORMATS[name])
    keys, values = cache.update_and_fetch(numbers(2, 2, 90, 64), numbers(2, 2, 90, 64, seed=2))
    queries, mask = numbers(2, 6, rows, 64, seed=3), create_causal_mask(rows, 90 - rows)
    for given in ("causal" if rows > 1 else None, mask):
        expected = attention(queries, keys, values, 0.125, given)
        with monkeypatch.context() as patch:
            patch.setattr(quantised, "backend", lambda: "metal")
            found = attention(queries, keys, values, 0.125, given)
        assert mx.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("where", "taken"), [("metal", 2), ("cuda", 0), ("cpu", 0)])
def test_words_are_multiplied_where_that_is_right(where: str, taken: int, monkeypatch: pytest.MonkeyPatch):
    """On CUDA every head would read the words of the first one."""
    calls: list[int] = []
    monkeypatch.setattr(quantised, "backend", lambda: where)
    monkeypatch.setattr(quantised, "over_words", lambda *_: calls.append(1))
    for name in FORMATS:
        keys, values = QuantisedKVCache(FORMATS[name]).update_and_fetch(numbers(1, 2, 9, 64), numbers(1, 2, 9, 64))
        attention(numbers(1, 4, 1, 64), keys, values, 0.125, None)
    assert len(calls) == taken
    monkeypatch.setenv(Road.KV_KERNEL, "0")
    attention(numbers(1, 4, 1, 64), keys, values, 0.125, None)
    assert len(calls) == taken


def test_the_trial_sees_a_kernel_that_is_wrong_for_one_row(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    (stage,), right = loaded(tiny_folder("llama", head_dim=64), 4), quantised.attention
    assert off_by(stage, FORMATS["k8v8"]) < 0.05

    def first_head(queries: mx.array, keys: Any, values: Any, *more: Any) -> mx.array:
        out = right(queries, keys, values, *more)
        few = isinstance(keys, quantised.Packed) and queries.shape[2] <= 8
        return mx.broadcast_to(out[:, :1], out.shape) * -3 if few else out

    monkeypatch.setattr(rows, "attention", first_head)
    assert off_by(stage, FORMATS["k8v8"]) > 0.5
