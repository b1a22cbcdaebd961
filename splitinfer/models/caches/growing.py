"""Appends to arrays that have room to grow, and enlarges them one after the other (``core.kv.growth``).

MLX writes into an array in place only if nothing else refers to its memory. A step in flight does refer to it until it
is done, so the next step's write copies the whole array. ``KVPool.must_end_first`` says when that costs too much.
"""

from typing import Any

import mlx.core as mx

from splitinfer.core.kv.growth import room
from splitinfer.models.library.mlx_lm import cache as mlx_caches


def written(at: int, phase: float, old: mx.array | None, new: mx.array) -> mx.array:
    """Return ``old`` [B, heads, room, d], enlarged if needed, with ``new`` [B, heads, n, d] written at token ``at``."""
    end = at + new.shape[2]
    if old is None or end > old.shape[2]:
        old = fitted(new[:, :, :0] if old is None else old[:, :, :at], room(end, phase))
    old[:, :, at:end] = new
    return old


def fitted(array: mx.array, length: int) -> mx.array:
    """Return an array [B, heads, tokens, d] cut or zero-padded to ``length`` tokens."""
    batch, heads, here, dim = array.shape
    if here >= length:
        return array[:, :, :length]
    return mx.concatenate([array, mx.zeros((batch, heads, length - here, dim), array.dtype)], axis=2)


class GrowingKVCache(mlx_caches.KVCache):  # type: ignore[misc]
    """mlx-lm's plain cache, but its arrays grow at a ``phase`` of its own."""

    cache_kind = mlx_caches.KVCache

    def __init__(self, phase: float = 0.0) -> None:
        super().__init__()
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset: int = 0
        self.phase = phase

    def encode(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Return new keys and values in their stored form."""
        return keys, values

    def decode(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return stored keys and values in the form that attention reads."""
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [B, heads, n, d] keys and values. Return all stored ones."""
        before, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = written(before, self.phase, self.keys, keys)
        self.values = written(before, self.phase, self.values, values)
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]
