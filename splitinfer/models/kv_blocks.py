"""Copies of a sequence's KV, block by block, from which other sequences begin.

A cache that holds something for each token (plain, quantised, a sliding window in temporal order) is cut along the
tokens, and put together again from blocks up to any token. Any other one (a recurrent state, a ring) only has a
*state*, which stands for all tokens up to now: a block keeps the one at its end, and only that can be gone on from.

A block's arrays are its own: cut out and copied, so that it keeps neither the sequence's arrays nor the graph alive.
One copy serves all who begin with it; each of them copies it once more into arrays with room to grow.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as mlx_caches

from splitinfer.models.caches import Cache, WindowKVCache
from splitinfer.models.cohort import SequenceCaches

_ROOM = 256  # tokens by which caches grow
_BY_TOKEN = (mlx_caches.KVCache, mlx_caches.QuantizedKVCache, mlx_caches.ConcatenateKVCache, WindowKVCache)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block keeps of one cache: the arrays of positions [start, end), or the state at ``end``.

    ``arrays``: a tree. ``by_token``: its arrays are [B, heads, end - start, d].
    """

    arrays: Any
    start: int
    end: int
    by_token: bool


@dataclass(frozen=True, slots=True)
class KVBlock:
    """A block on this stage: the pieces of its own caches, in their order; ``None`` for one that is never written."""

    pieces: tuple[Any, ...]
    start: int
    end: int

    def arrays(self) -> list[mx.array]:
        """All arrays."""
        leaves = (leaf for _, leaf in tree_flatten([_trees(piece) for piece in self.pieces]))
        return [leaf for leaf in leaves if isinstance(leaf, mx.array)]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays())


def cut(caches: SequenceCaches, places: Sequence[int], start: int, end: int) -> KVBlock:
    """Positions [start, end) of a sequence that has come at least that far. Computes nothing yet."""
    return KVBlock(tuple(_cut(caches.kv_cache(place), start, end) for place in places), start, end)


def join(caches: SequenceCaches, places: Sequence[int], blocks: Sequence[KVBlock], length: int) -> list[mx.array]:
    """Let fresh caches begin with ``length`` tokens of consecutive blocks; the arrays made for it.

    Raises:
        ValueError: the blocks do not hold them.
    """
    begins = [block.start for block in blocks]
    if begins != [0, *(block.end for block in blocks[:-1])] or not begins[-1] < length <= blocks[-1].end:
        raise ValueError(f"blocks from {begins} cannot hold the first {length} tokens")
    made: list[mx.array] = []
    for i, place in enumerate(places):
        made += _join(caches.full[place], [block.pieces[i] for block in blocks], length)
    caches.place.position = length
    return made


def bytes_of_block(caches: SequenceCaches, places: Sequence[int], length: int) -> int:
    """Bytes that the last full block of a sequence of ``length`` tokens takes."""
    return cut(caches, places, length - _ROOM, length).nbytes


def _trees(piece: Any) -> Any:
    if isinstance(piece, list):
        return [_trees(one) for one in piece]
    return None if piece is None else piece.arrays


def _cut(cache: Cache, start: int, end: int) -> Any:
    if isinstance(cache, mlx_caches.CacheList):
        return [_cut(one, start, end) for one in cache.caches]
    if cache.empty():
        return None
    if not isinstance(cache, _BY_TOKEN):
        return Piece(tree_map(_copied, cache.state), start, end, by_token=False)
    base = cache.base if isinstance(cache, WindowKVCache) else 0
    first = max(start, base)
    tree = (cache.keys, cache.values)
    return Piece(tree_map(lambda a: _copied(a[..., first - base : end - base, :]), tree), first, end, by_token=True)


def _copied(leaf: Any) -> Any:
    """An array of its own: whoever wrote to the old one in place would write to this one, too."""
    return mx.contiguous(leaf[...]) if isinstance(leaf, mx.array) else leaf


def _join(cache: Cache, pieces: Sequence[Any], length: int) -> list[mx.array]:
    if isinstance(cache, mlx_caches.CacheList):
        made: list[mx.array] = []
        for i, one in enumerate(cache.caches):
            made += _join(one, [piece[i] for piece in pieces], length)
        return made
    last = pieces[-1]
    if last is None:
        return []
    if not last.by_token:
        if last.end != length:
            raise ValueError(f"a state at {last.end} tokens is not one at {length}")
        cache.state = tree_map(_copied, last.arrays)
        return []
    base = _first_wanted(cache, length)
    wanted = [piece for piece in pieces if piece is not None and piece.end > base]
    if any(one.end != other.start for one, other in itertools.pairwise(wanted)) or wanted[0].start > base:
        raise ValueError(f"positions from {base} on are not all there")
    cut_off = [tree_map(lambda a, p=p: a[..., max(base - p.start, 0) : length - p.start, :], p.arrays) for p in wanted]
    cache.keys, cache.values = tree_map(lambda *parts: _with_room(cache, parts), *cut_off)
    cache.offset = length
    if isinstance(cache, WindowKVCache):
        cache.base = base
    return [leaf for _, leaf in tree_flatten((cache.keys, cache.values))]


def _first_wanted(cache: Cache, length: int) -> int:
    """The first position whose keys a cache of ``length`` tokens still needs."""
    return cache.first_needed(length) if isinstance(cache, WindowKVCache) else 0


def _with_room(cache: Cache, parts: Sequence[mx.array]) -> mx.array:
    used = sum(part.shape[-2] for part in parts)
    room = 0 if isinstance(cache, mlx_caches.ConcatenateKVCache) else -used % _ROOM
    shape = (*parts[0].shape[:-2], room, parts[0].shape[-1])
    return mx.concatenate([*parts, *([mx.zeros(shape, parts[0].dtype)] if room else [])], axis=-2)
