"""Stores keys and values in few bits (``core.kv.format``), and computes attention over them.

    layer's k, v [B, heads, n, d] --quantise--> words, scales, biases, each [B, heads, n, *]
    attention    <--few rows on Metal: products with the words themselves; else: dequantised, then MLX's own--

On CUDA, MLX treats words that are broadcast over a head's queries as the words of one head (``qmm_utils.h``; MLX 0.32).
The cache returns a placeholder (``Packed``); only the attention function that replaces mlx-lm's
(``models.caches.rows``) can read it. Numbers are quantised in float32: scale and bias in half precision would double
the error.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from splitinfer.core.kv.format import KVFormat
from splitinfer.errors import ModelError
from splitinfer.models.caches.attention import backend
from splitinfer.models.caches.growing import GrowingKVCache, written
from splitinfer.models.library.mlx_lm import base
from splitinfer.system.gpu_roads import Road

_GROUPS = (64, 32)  # numbers that share a scale; the largest that divides a head
_FEW_ROWS = 8  # up to this many, products with words are faster than dequantising

Columns = tuple[mx.array, mx.array, mx.array]  # words, scales, biases: each [B, heads, tokens, *]
_original = base.scaled_dot_product_attention


class CannotQuantise(ModelError):
    """No group size divides the head dimension."""


def group_size(dim: int) -> int:
    """Return how many of a head's ``dim`` numbers share a scale.

    Raises:
        CannotQuantise: no group size divides ``dim``.
    """
    found = next((size for size in _GROUPS if dim % size == 0), None)
    if found is None:
        raise CannotQuantise(f"its heads have {dim} numbers, and {_GROUPS[-1]} does not divide that")
    return found


def quantise(array: mx.array, bits: int) -> Columns:
    """Return the numbers [B, heads, n, d] in ``bits`` bits each."""
    group = group_size(array.shape[-1])
    words, scales, biases = mx.quantize(array.astype(mx.float32), group_size=group, bits=bits)
    if group < _GROUPS[0]:  # so that scales take as many bits as with the larger group
        scales, biases = scales.astype(mx.float16), biases.astype(mx.float16)
    return words, scales, biases


@dataclass(frozen=True, slots=True)
class Packed:
    """Stored keys or values as a model's code sees them: they have a shape and a dtype, but no array."""

    columns: Columns
    bits: int
    dtype: mx.Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [B, heads, tokens, d] of the numbers."""
        words = self.columns[0]
        return (*words.shape[:-1], words.shape[-1] * 32 // self.bits)

    @property
    def _group(self) -> int:
        return group_size(self.shape[-1])

    def numbers(self) -> mx.array:
        """Return the dequantised numbers, [B, heads, tokens, d]."""
        words, scales, biases = self.columns
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        full = mx.dequantize(words, scales, biases, group_size=self._group, bits=self.bits)
        return full.astype(self.dtype)

    def product(self, x: mx.array, *, transpose: bool) -> mx.array:
        """Return the product of ``x`` [B, heads, repeats, rows, *] with each head's own keys or values."""
        words, scales, biases = (column[:, :, None] for column in self.columns)
        scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=self._group, bits=self.bits
        )


class QuantisedKVCache(GrowingKVCache):
    """A ``GrowingKVCache`` whose ``keys`` and ``values`` are columns with ``format``'s bits."""

    def __init__(self, format: KVFormat, phase: float = 0.0) -> None:
        super().__init__(phase)
        self.format = format
        self.dtype = mx.float32

    def encode(self, keys: mx.array, values: mx.array) -> tuple[Columns, Columns]:
        """Return new keys and values in their stored form."""
        self.dtype = keys.dtype
        return quantise(keys, self.format.key_bits), quantise(values, self.format.value_bits)

    def decode(self, keys: Columns, values: Columns) -> tuple[Packed, Packed]:
        """Return stored keys and values in the form that attention reads."""
        return Packed(keys, self.format.key_bits, self.dtype), Packed(values, self.format.value_bits, self.dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Append [B, heads, n, d] keys and values. Return all stored ones."""
        before, self.offset = self.offset, self.offset + keys.shape[2]
        new = self.encode(keys, values)
        if self.keys is None:
            self.keys, self.values = tree_map(lambda array: array[:, :, :0], new)
        self.keys, self.values = tree_map(partial(written, before, self.phase), (self.keys, self.values), new)
        return self.decode(*self.state)

    @property
    def state(self) -> Any:
        """All stored keys and values."""
        return tree_map(lambda array: array[:, :, : self.offset], (self.keys, self.values))


def attention(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """Return attention [B, heads, n, d] of queries over keys and values, which may be packed."""
    if not isinstance(keys, Packed):
        return cast(mx.array, _original(queries, keys, values, cache=None, scale=scale, mask=mask, sinks=sinks))
    if sinks is None and queries.shape[2] <= _FEW_ROWS and backend() == "metal" and Road.KV_KERNEL.is_open:
        return over_words(queries, keys, values, scale, mask)
    full, other = keys.numbers(), values.numbers()
    return cast(mx.array, _original(queries, full, other, cache=None, scale=scale, mask=mask, sinks=sinks))


def over_words(q: mx.array, keys: Packed, values: Packed, scale: float, mask: Any) -> mx.array:
    """Return attention over packed keys and values. It reads each stored word once and does not dequantise, because
    decode is bound by memory bandwidth."""
    batch, heads, rows, dim = q.shape
    num_kv, tokens = keys.shape[1], keys.shape[2]
    q = (scale * q.astype(mx.float32)).reshape(batch, num_kv, heads // num_kv, rows, dim)
    scores = keys.product(q, transpose=True)
    if isinstance(mask, str):
        mask = mx.arange(tokens - rows, tokens)[:, None] >= mx.arange(tokens)[None]
    if mask is not None:
        if mask.ndim == 4:  # [B, heads or 1, rows, tokens]
            mask = mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(batch, num_kv, -1, *mask.shape[2:])
        least = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, least) if mask.dtype == mx.bool_ else scores + mask
    out = values.product(mx.softmax(scores, axis=-1, precise=True), transpose=False)
    return out.reshape(batch, heads, rows, -1).astype(values.dtype)
