"""Copies a sequence's KV into blocks, from which other sequences start.

A cache with an entry for each token (plain, quantised, a sliding window in temporal order) is cut along the tokens, and
can be joined again up to any token. Any other cache only has a *state*, which summarises all tokens so far: a sequence
can start only at the end of its block. In a list of caches, one may *lag*: it lacks the last tokens, which the model
makes again if it needs them (GLM-5.3-Flash: the keys and values of prompts, projected). It is joined up to its first
gap. Outside this process a block is a list of *parts*, one for each cache, and a whole number in a state is an array of
one number. Parts read from a file must match the form of a block that was cut here (a *sample*), of one at a full chunk
or of one behind it, in which caches lag that may, and a state may have more arrays.

A block's arrays are copies. The arrays of one cache are packed into one, byte by byte (``PackedTree``): a GPU has a
limited number of buffers (``memory.counted_bytes``), and the quantised keys and values of one layer would take six.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from splitinfer.core.kv.growth import BLOCK, room
from splitinfer.core.plan import StoredPart, TensorSpec
from splitinfer.models.border.tensors import mlx_dtype, spec_of, to_buffer
from splitinfer.models.caches.caches import Cache, WindowKVCache, copied_state, is_list, is_plain, reached
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.library.mlx_lm import cache as mlx_caches

_ROOM = BLOCK  # tokens of a full block


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree of arrays, packed into one array. ``form``: the tree with a ``TensorSpec`` in place of each array.
    ``data``: uint8 [bytes], the widest numbers first, so that each array begins at a multiple of its item size."""

    form: Any
    data: mx.array

    @classmethod
    def of(cls, tree: Any) -> "PackedTree":
        """Pack a tree. Computes nothing yet. Several arrays are copied, so their memory is not held."""
        arrays = [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
        form = tree_map(lambda leaf: spec_of(leaf) if isinstance(leaf, mx.array) else leaf, tree)
        pieces = [arrays[i].reshape(-1).view(mx.uint8) for i in _order(specs_of(form))]
        return cls(form, mx.concatenate(pieces) if pieces else mx.zeros((0,), mx.uint8))

    @classmethod
    def from_buffers(cls, form: Any, buffers: Sequence[memoryview | bytes]) -> "PackedTree":
        """Pack the bytes of a form's arrays, given in the order of the tree, which must have the form's sizes."""
        found = [np.frombuffer(buffers[i], np.uint8) for i in _order(specs_of(form))]
        return cls(form, mx.array(np.concatenate(found)) if found else mx.zeros((0,), mx.uint8))

    def tree(self) -> Any:
        """Return the tree, its arrays cut out of ``data``. Computes nothing yet."""
        specs = specs_of(self.form)
        arrays = [
            self.data[at : at + nbytes_of(spec)].view(mlx_dtype(spec.dtype)).reshape(spec.shape)
            for spec, at in zip(specs, _offsets(specs), strict=True)
        ]
        following = iter(arrays)
        return tree_map(lambda leaf: next(following) if isinstance(leaf, TensorSpec) else leaf, self.form)

    def buffers(self) -> list[memoryview]:
        """Return the bytes of each array, in the order of the tree. ``data`` must be computed."""
        specs, whole = specs_of(self.form), to_buffer(self.data)
        return [whole[at : at + nbytes_of(spec)] for spec, at in zip(specs, _offsets(specs), strict=True)]


def specs_of(form: Any) -> list[TensorSpec]:
    """Return the specs of a form's arrays, in the order of the tree."""
    return [leaf for _, leaf in tree_flatten(form) if isinstance(leaf, TensorSpec)]


def nbytes_of(spec: TensorSpec) -> int:
    """Return the size of an array in bytes."""
    return prod(spec.shape) * mlx_dtype(spec.dtype).size


def _order(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the arrays' indices in the order of packing."""
    return sorted(range(len(specs)), key=lambda i: -mlx_dtype(specs[i].dtype).size)


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the offset of each array in bytes."""
    offsets, at = [0] * len(specs), 0
    for i in _order(specs):
        offsets[i] = at
        at += nbytes_of(specs[i])
    return offsets


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """One cache's part of a block: the arrays of positions [start, end), or the state at ``end``.

    ``by_token``: the packed arrays are [B, heads, end - start, d]; of a cache that lags, there may be no positions.
    """

    packed: PackedTree
    start: int
    end: int
    by_token: bool


@dataclass(frozen=True, slots=True)
class KVBlock:
    """A block on this stage. ``pieces``: one for each of its own caches, in order; ``None`` for a cache that is never
    written, a list for a list of caches."""

    pieces: tuple[Any, ...]
    start: int
    end: int

    def arrays(self) -> list[mx.array]:
        """Return all arrays: one for each cache that has a piece."""
        return [piece.packed.data for _, piece in tree_flatten(self.pieces) if piece is not None]

    def for_host(self) -> "KVBlock":
        """Return a copy that shares no array with sequences that start from this block. Computes nothing yet."""

        def copied(piece: BlockPiece | None) -> BlockPiece | None:
            return piece and replace(piece, packed=replace(piece.packed, data=piece.packed.data + 0))

        return KVBlock(tree_map(copied, self.pieces), self.start, self.end)

    @property
    def nbytes(self) -> int:
        """The bytes that it holds."""
        return sum(array.nbytes for array in self.arrays())


def cut(caches: SequenceCaches, places: Sequence[int], start: int, end: int) -> KVBlock:
    """Return the block of positions [start, end) of a sequence of at least ``end`` tokens. Computes nothing yet."""
    return KVBlock(tuple(_cut(caches.kv_cache(place), start, end) for place in places), start, end)


def moved(block: KVBlock, by: int) -> KVBlock:
    """Return the block with its positions moved ``by`` tokens later, for stages that are only timed."""

    def later(piece: BlockPiece | None) -> BlockPiece | None:
        return piece and replace(piece, start=piece.start + by, end=piece.end + by)

    return KVBlock(tree_map(later, block.pieces), block.start + by, block.end + by)


def layer_by_layer(blocks: Iterable[KVBlock]) -> list[mx.array]:
    """Return the arrays of several blocks in the best order to compute them: layer by layer. If a sequence is freed
    while all of it is cut into blocks, each layer gives its memory back before the next is copied. With 16 layers that
    needs a fifth of its KV in addition; block by block, all of it (measured on the CPU)."""
    each = itertools.zip_longest(*[block.arrays() for block in blocks])
    return [array for arrays in each for array in arrays if array is not None]


def join(caches: SequenceCaches, places: Sequence[int], blocks: Sequence[KVBlock], length: int) -> list[mx.array]:
    """Fill fresh caches with the first ``length`` tokens of consecutive blocks. Return the arrays made for that.

    Raises:
        ValueError: the blocks do not hold those tokens.
    """
    begins = [block.start for block in blocks]
    if begins != [0, *(block.end for block in blocks[:-1])] or not begins[-1] < length <= blocks[-1].end:
        raise ValueError(f"blocks from {begins} cannot hold the first {length} tokens")
    made: list[mx.array] = []
    for i, place in enumerate(places):
        made += _join(cache := caches.full[place], [block.pieces[i] for block in blocks], length)
        if reached(cache) not in (0, length):
            raise ValueError(f"the blocks lack positions from {reached(cache)} on")
    caches.place.position = caches.heads_at = length
    return made


CacheSlot = tuple[int, ...]  # a cache's place in the model's list, then its places in nested lists of caches


BlockParts = Mapping[CacheSlot, tuple[StoredPart, Sequence[memoryview | bytes]]]
"""By slot: a cache's part of a block, and the bytes of its arrays."""


def parts_of(block: KVBlock, places: Sequence[int]) -> BlockParts | None:
    """Return the parts of an evaluated block of the caches at ``places``, or None if a piece has other data."""
    parts = dict[CacheSlot, tuple[StoredPart, Sequence[memoryview | bytes]]]()
    for path, piece in tree_flatten(block.pieces):
        if piece is None:
            continue
        slot = _slot(places, path)
        leaves, buffers = _leaves(piece.packed.form), iter(piece.packed.buffers())
        if not all(isinstance(leaf, TensorSpec | int) for leaf in leaves):
            return None
        specs = tuple(leaf if isinstance(leaf, TensorSpec) else _NUMBER for leaf in leaves)
        part = StoredPart(slot, piece.by_token, piece.start, piece.end, specs)
        parts[slot] = part, tuple(next(buffers) if isinstance(leaf, TensorSpec) else _packed(leaf) for leaf in leaves)
    return parts


def block_of(parts: BlockParts, places: Sequence[int], samples: Sequence[KVBlock], start: int, end: int) -> KVBlock:
    """Return the block of positions [start, end) from its parts, each of which must match the form in one of
    ``samples``; in the last of these, caches lag that may.

    Raises:
        ValueError: a part has another form or other positions.
    """

    def made(path: str, *likes: BlockPiece | None) -> BlockPiece | None:
        may_lag = likes[-1] is not None and likes[-1].end < samples[-1].end
        found = [like for like in likes if like is not None]
        return _piece(parts, _slot(places, path), found, start, end, may_lag=may_lag)

    return KVBlock(tree_map_with_path(made, *(sample.pieces for sample in samples)), start, end)


_NUMBER = TensorSpec("int64", ())


def _packed(number: int) -> bytes:
    return np.int64(number).tobytes()


def _leaves(form: Any) -> list[Any]:
    return [leaf for _, leaf in tree_flatten(form) if leaf is not None]


def _slot(places: Sequence[int], path: str) -> CacheSlot:
    """Return the slot of a piece from its path among the pieces of a block."""
    first, *within = map(int, path.split("."))
    return places[first], *within


def _piece(
    parts: BlockParts, slot: CacheSlot, likes: Sequence[BlockPiece], start: int, end: int, *, may_lag: bool
) -> BlockPiece | None:
    if not likes or slot not in parts:
        if slot in parts or (likes and not may_lag):
            raise ValueError(f"the cache at {slot} should be {'there' if likes else 'empty'}")
        return None
    part, buffers = parts[slot]
    forms = [like.packed.form for like in likes if like.by_token == part.by_token]
    like = next((form for form in forms if _is_like(part, _leaves(form))), None)
    is_within = start <= part.start <= part.end <= end if may_lag else start <= part.start < part.end == end
    if like is None or not is_within:
        raise ValueError(f"the cache at {slot} is of another kind, or of positions {part.start} to {part.end}")
    stored, arrays = iter(zip(part.arrays, buffers, strict=True)), list[memoryview | bytes]()

    def made(leaf: Any) -> Any:
        if leaf is None:
            return None
        spec, data = next(stored)
        if isinstance(leaf, TensorSpec):
            arrays.append(data)
            return spec
        return type(leaf)(np.frombuffer(data, np.int64)[0])

    form = tree_map(made, like)
    return BlockPiece(PackedTree.from_buffers(form, arrays), part.start, part.end, part.by_token)


def _is_like(part: StoredPart, leaves: Sequence[Any]) -> bool:
    """Return whether a part's arrays are of a form, apart from the dimensions that depend on the tokens."""

    def fixed(spec: TensorSpec) -> Any:
        return spec.dtype, (*spec.shape[:-2], spec.shape[-1]) if part.by_token else len(spec.shape)

    wanted = [fixed(leaf if isinstance(leaf, TensorSpec) else _NUMBER) for leaf in leaves]
    return [fixed(spec) for spec in part.arrays] == wanted


def bytes_of_block(caches: SequenceCaches, places: Sequence[int], length: int) -> int:
    """Return the bytes of the last full block of a sequence of ``length`` tokens."""
    return cut(caches, places, length - _ROOM, length).nbytes


def _cut(cache: Cache, start: int, end: int) -> Any:
    if is_list(cache):
        return [_cut(one, start, end) for one in cache.caches]
    if cache.empty():
        return None
    if not (is_plain(cache) or isinstance(cache, WindowKVCache)):
        return BlockPiece(PackedTree.of(cache.state), start, end, by_token=False)
    base = cache.base if isinstance(cache, WindowKVCache) else 0
    first, last = max(start, base), max(start, base, min(end, cache.offset))
    packed = PackedTree.of(tree_map(lambda a: a[..., first - base : last - base, :], (cache.keys, cache.values)))
    return BlockPiece(packed, first, last, by_token=True)


def _join(cache: Cache, pieces: Sequence[Any], length: int) -> list[mx.array]:
    if is_list(cache):
        made: list[mx.array] = []
        for i, one in enumerate(cache.caches):
            made += _join(one, [piece[i] for piece in pieces], length)
        return made
    there = [piece for piece in pieces if piece is not None]
    if there and not there[-1].by_token:
        if there[-1].end != length:
            raise ValueError(f"a state at {there[-1].end} tokens cannot be used at {length}")
        cache.state = copied_state(there[-1].packed.tree())
        return []
    base = cache.first_needed(length) if isinstance(cache, WindowKVCache) else 0
    held, parts = base, list[Any]()
    for piece in there:
        if piece.start <= held < piece.end:
            rows = slice(held - piece.start, length - piece.start)
            parts.append(tree_map(lambda a, rows=rows: a[..., rows, :], piece.packed.tree()))
            held = min(piece.end, length)
    if not parts:
        return []
    grows = not isinstance(cache, mlx_caches.ConcatenateKVCache)
    cache.keys, cache.values = tree_map(partial(_joined, grows, getattr(cache, "phase", 0.0)), *parts)
    cache.offset = held
    if isinstance(cache, WindowKVCache):
        if held < length:
            raise ValueError(f"the blocks lack positions from {held} on")
        cache.base = base
    return [leaf for _, leaf in tree_flatten((cache.keys, cache.values))]


def _joined(grows: bool, phase: float, *parts: mx.array) -> mx.array:
    used = sum(part.shape[-2] for part in parts)
    more = room(used, phase) - used if grows else 0
    shape = (*parts[0].shape[:-2], more, parts[0].shape[-1])
    return mx.concatenate([*parts, *([mx.zeros(shape, parts[0].dtype)] if more else [])], axis=-2)
