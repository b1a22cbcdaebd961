"""Makes a stage's cache list: the stage's own caches, and ghosts for the layers of other stages.

A model's cache list stays at full length, because its own code indexes it: masks are made from ``cache[self.fa_idx]``,
wherever that layer is. So the place of another stage's cache holds a *ghost*: it has the offset and the mask of the
first own cache of the same kind, and raises if anything writes to it. If both sides of a border need the keys and
values of a layer, its cache is *shared*: the earlier stage keeps the last ones that it stored, and the later stage's
replica stores the received ones.

A sliding window uses ``WindowKVCache`` in place of mlx-lm's rotating cache. That one stores in ring order, so its sums
depend on how the tokens were chunked, and it cannot be rolled back.
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from splitinfer.core.kv.format import KVFormat
from splitinfer.core.kv.growth import phase_of
from splitinfer.core.kv.rewind import NEVER, UNLIMITED, WITHIN_DRAFTS, least_rewind
from splitinfer.models.caches.growing import GrowingKVCache, fitted
from splitinfer.models.caches.quantised import QuantisedKVCache
from splitinfer.models.library.layers import StandIn
from splitinfer.models.library.mlx_lm import base
from splitinfer.models.library.mlx_lm import cache as mlx_caches


@functools.cache
def _derived(mixin: type, cls: type) -> type:
    """Return a subclass of ``cls`` with ``mixin`` as its first base."""
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {"cache_kind": cls})


class WholeState:
    """A mixin for caches of an unknown form (``_derived``): all that they hold is a state that can be saved and put
    back. The state is the class's own ``state`` and ``meta_state`` if they have setters, else the cache's
    attributes."""

    def empty(self) -> bool:
        """Return whether nothing was ever stored."""
        return not any(array.size for array in arrays_within(vars(self)))

    @property
    def state(self) -> Any:
        """Everything that the cache holds."""
        base: Any = super()
        return (base.state, base.meta_state) if _puts_back(type(self)) else dict(vars(self))

    @state.setter
    def state(self, found: Any) -> None:
        if not _puts_back(type(self)):
            vars(self).update(found)
            return
        for name, value in zip(("state", "meta_state"), found, strict=True):
            _own(type(self), name).fset(self, value)


def with_state(cache: Any) -> Any:
    """Return ``cache``, made a ``WholeState`` if its class has no ``empty()`` or no setter of ``state``."""
    if not hasattr(cache, "empty") or _own(type(cache), "state").fset is None:
        cache.__class__ = _derived(WholeState, cache.__class__)
    return cache


def _puts_back(cls: type) -> bool:
    return all(_own(cls, name).fset is not None for name in ("state", "meta_state"))


def _own(cls: type, name: str) -> Any:
    """Return a property of the cache's own class, or an empty one (without getter and setter) if it has none."""
    bases = (base for base in cls.__mro__ if base is not WholeState and name in vars(base))
    found = vars(next(bases, object)).get(name)
    return found if isinstance(found, property) else property()


Cache = Any  # mlx-lm's cache protocol is duck-typed

# Classes by name, because mlx-vlm has its own of the same form.
_PLAIN = ("KVCache", "QuantizedKVCache", "ConcatenateKVCache")
_STATES = ("ArraysCache", "PoolingCache", "WholeState")
_EVEN = (*_PLAIN, "GrowingKVCache", "QuantisedKVCache", "ArraysCache")


def fresh_caches(model: Any) -> list[Cache]:
    """Return the caches that a model makes for a sequence, with mlx-lm's classes in place of mlx-vlm's equal ones."""
    return [_as_mlx_lms(cache) for cache in mlx_caches.make_prompt_cache(model)]


def _as_mlx_lms(cache: Cache) -> Cache:
    if is_list(cache):
        cache.caches = tuple(map(_as_mlx_lms, cache.caches))
    elif type(cache).__module__ == "mlx_vlm.models.cache":
        if type(cache).__name__ == "KVCache":
            return mlx_caches.KVCache()
        if type(cache).__name__ == "RotatingKVCache":
            return mlx_caches.RotatingKVCache(cache.max_size, cache.keep)
    return cache if is_list(cache) else with_state(cache)


def is_plain(cache: Cache) -> bool:
    """Return whether a cache holds keys and values [B, heads, tokens, d] of every token and nothing else."""
    derived = itertools.takewhile(lambda cls: cls.__name__ not in _PLAIN, cache.__class__.__mro__)
    return can_be_cut(cache) and all(
        cls.__module__.startswith("splitinfer.") or "state" not in vars(cls) for cls in derived
    )


def can_be_cut(cache: Cache) -> bool:
    """Return whether a cache grows with every token and can drop its last tokens by itself."""
    return _is_one_of(cache, _PLAIN)


def _is_one_of(cache: Cache, names: Collection[str]) -> bool:
    return any(cls.__name__ in names for cls in cache.__class__.__mro__)


def is_list(cache: Cache) -> bool:
    """Return whether a cache is a list of caches."""
    return hasattr(cache, "caches")


def grows_evenly(cache: Cache) -> bool:
    """Return whether a non-empty cache grows by the same number of bytes with each token, which may be 0."""
    return all(type(part).__name__ in _EVEN for part in _parts(cache))


def grow_in_step(cache: Cache) -> None:
    """Make an empty cache grow in the same steps as all others (``core.kv.growth``)."""
    for one in _parts(cache):
        if isinstance(one, GrowingKVCache):
            one.phase = 0.0


class WindowKVCache(mlx_caches._BaseCache):  # type: ignore[misc]
    """Keys and values of at least the last ``window`` tokens, in temporal order.

    ::

        position   base ...... oldest visible ........ offset
                    |  slack    |     window            |
        storage    [0 ................................. offset - base | room]

    ``base`` is a multiple of ``ALIGN``. A masked key adds an exact zero to every sum, and with aligned starts the keys
    of one position always fall on the same lane of a vector unit; so a row's result does not depend on how many rows
    came with it. At least ``SLACK`` tokens can be rolled back.
    """

    ALIGN = 64
    SLACK = 256
    STEP = 256

    def __init__(self, window: int) -> None:
        self.window = window
        self.offset = 0
        self.base = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def max_size(self) -> int:
        """mlx-lm's name for the window."""
        return self.window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, heads, N, D] keys and values; return all stored ones, oldest first."""
        self._drop_old()
        used, new = self.offset - self.base, keys.shape[2]
        self._grow(used + new, keys, values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., used : used + new, :] = keys
        self.values[..., used : used + new, :] = values
        self.offset += new
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all stored keys and values, oldest first."""
        assert self.keys is not None
        assert self.values is not None
        used = self.offset - self.base
        return self.keys[..., :used, :], self.values[..., :used, :]

    def first_needed(self, offset: int) -> int:
        """Return the aligned first position whose keys the row at ``offset`` needs, with ``SLACK`` for rollback."""
        oldest = offset - self.window - self.SLACK  # some models' masks reach one token past the window
        return max(self.base, oldest // self.ALIGN * self.ALIGN)

    def _drop_old(self) -> None:
        # Only when a whole step of tokens is no longer needed, so that copies are rare.
        first = self.first_needed(self.offset)
        if self.keys is not None and self.values is not None and first - self.base >= self.STEP:
            cut, used = first - self.base, self.offset - self.base
            self.keys = mx.contiguous(self.keys[..., cut:used, :])
            self.values = mx.contiguous(self.values[..., cut:used, :])
            self.base = first

    def _grow(self, wanted: int, keys: mx.array, values: mx.array) -> None:
        room = 0 if self.keys is None else self.keys.shape[2]
        if wanted <= room:
            return
        room += -(-(wanted - room) // self.STEP) * self.STEP
        self.keys = fitted(keys[:, :, :0] if self.keys is None else self.keys, room)
        self.values = fitted(values[:, :, :0] if self.values is None else self.values, room)

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Return the mask for the next ``n`` rows over what ``update_and_fetch`` will return."""
        self._drop_old()
        window = window_size or self.window
        past = self.offset - self.base
        if past + n <= window and not return_array:
            return "causal" if n > 1 else None
        return cast(mx.array, base.create_causal_mask(n, past, window_size=window))

    def is_trimmable(self) -> bool:
        """Return True: within ``rewind_limit`` the cache can always be rolled back."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last ``n`` tokens if the window before them is still stored. Return how many were dropped."""
        oldest = self.offset - n - self.window
        if n > self.offset - self.base or (self.base > 0 and oldest < self.base):
            return 0
        self.offset -= n
        return n

    def size(self) -> int:
        """Return the number of stored tokens."""
        return self.offset - self.base

    def empty(self) -> bool:
        """Return whether nothing was ever stored."""
        return self.keys is None

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays, which must be evaluated, and the numbers that describe them."""
        return self.keys, self.values, self.offset, self.base, self.window


def own_cache(cache: Cache, format: KVFormat | None = None, phase: float = 0.0) -> Cache:
    """Return the cache that a stage uses for a layer of its own: a ``WindowKVCache`` for a sliding window; a cache that
    grows at ``phase`` and stores in ``format``, if given, for plain keys and values; otherwise the model's own."""
    if is_list(cache):
        cache.caches = tuple(own_cache(c, format, phase) for c in cache.caches)
        return cache
    if can_quantise(cache):
        return GrowingKVCache(phase) if format is None else QuantisedKVCache(format, phase)
    if type(cache) is mlx_caches.RotatingKVCache and cache.keep == 0:
        return WindowKVCache(cache.max_size)
    return cache


def heads_caches(made: Sequence[Cache]) -> list[Cache]:
    """Return the caches of a drafter's layers for one sequence. ``made``: the caches that its class made."""
    return [own_cache(_as_mlx_lms(cache), phase=phase_of(i)) for i, cache in enumerate(made)]


def can_quantise(cache: Cache) -> bool:
    """Return whether a cache may be stored in few bits: not windows and states, which do not grow with the context."""
    return type(cache) is mlx_caches.KVCache


def rewind_limit(cache: Cache) -> int | None:
    """Return by how many tokens this cache can always be rolled back (``core.kv.rewind``)."""
    if is_list(cache):
        return least_rewind(rewind_limit(c) for c in cache.caches)
    if can_be_cut(cache):
        return UNLIMITED
    if isinstance(cache, WindowKVCache):
        return WindowKVCache.SLACK
    return WITHIN_DRAFTS if _is_state(cache) else NEVER


def trim(cache: Cache, n: int) -> bool:
    """Roll one cache back by ``n`` tokens and return whether that succeeded. A state does not change. In a list, some
    caches may lack the last tokens."""
    if is_list(cache):
        lag = {id(one): reached(cache) - one.offset for one in _parts(cache) if can_be_cut(one)}
        return all(trim(one, max(0, n - lag.get(id(one), 0))) for one in _parts(cache))
    if cache.empty() or _is_state(cache):
        return True  # never written, or ``KVPool`` restores a saved one
    return bool(cache.is_trimmable() and cache.trim(n) == n)


def reached(cache: Cache) -> int:
    """Return how many tokens a cache holds that grows with every token; in a list, the longest. Other caches: 0."""
    return max((one.offset for one in _parts(cache) if can_be_cut(one)), default=0)


def nbytes_written(cache: Cache) -> int:
    """Return the bytes of the arrays that the next step writes into: all except states, which each step makes anew."""
    parts = (part for part in _parts(cache) if not _is_state(part))
    return sum(array.nbytes for part in parts for array in arrays_of(part))


def states_of(cache: Cache) -> Iterator[Cache]:
    """Return the parts of a cache that hold a state: a summary of all tokens so far, which cannot be cut."""
    return (part for part in _parts(cache) if _is_state(part) and not part.empty())


def _is_state(cache: Cache) -> bool:
    return _is_one_of(cache, _STATES)


def copied_state(state: Any) -> Any:
    """Return a copy of a state that later writes to the original do not change. Both share memory until such a write:
    MLX does not write in place into a shared array."""
    return tree_map(lambda leaf: mx.contiguous(leaf[...]) if isinstance(leaf, mx.array) else leaf, state)


class Mark:
    """A place in caches that they can return to, after entries were added."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        parts = [part for cache in caches for part in _parts(cache)]
        self._kept = [(part, copied_state(vars(part)) if _is_state(part) else part.offset) for part in parts]

    def restore(self) -> None:
        """Drop the entries that were added after the mark."""
        for part, kept in self._kept:
            if _is_state(part):
                vars(part).update(kept)
            else:
                part.trim(part.offset - kept)


class CachePlace:
    """A sequence's position. Ghosts that have no own cache of their kind read their offset from it."""

    def __init__(self) -> None:
        self.position = 0


def make_list(
    fresh: Sequence[Cache], own: Collection[int], place: CachePlace, format: KVFormat | None = None
) -> tuple[list[Cache], list[Cache]]:
    """Return the full-length cache list of one sequence, and the stage's own caches in it.

    ``fresh``: the list that the model's own ``make_cache`` returned. ``own``: the places of the stage's own caches.
    ``format``: how they store keys and values; ``None``: as computed.
    """
    full = [own_cache(cache, format, phase_of(i)) if i in own else cache for i, cache in enumerate(fresh)]
    own_by_kind: dict[tuple[Any, ...], Cache] = {}
    for part in (part for i in sorted(own) for part in _parts(full[i])):
        own_by_kind.setdefault(kind_of(part), part)
    full = [cache if i in own else _ghost(cache, own_by_kind, place) for i, cache in enumerate(full)]
    return full, [full[i] for i in sorted(own)]


def _parts(cache: Cache) -> Iterator[Cache]:
    """Yield the caches in a list of caches, or the cache itself if it is not a list."""
    if is_list(cache):
        for one in cache.caches:
            yield from _parts(one)
    else:
        yield cache


def arrays_of(cache: Cache) -> list[mx.array]:
    """Return every array in a cache."""
    return [] if cache.empty() else arrays_within(cache.state)


def arrays_within(value: Any) -> list[mx.array]:
    """Return every array in nested lists, tuples and dictionaries, without the paths that ``tree_flatten`` makes."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [array for each in value for array in arrays_within(each)]


def kind_of(cache: Cache) -> tuple[Any, ...]:
    """Return a key that two caches share if they are interchangeable for offset and mask."""
    if is_list(cache):
        return ("list", *(kind_of(c) for c in cache.caches))
    if isinstance(cache, mlx_caches.RotatingKVCache | WindowKVCache):
        return ("window", cache.max_size, getattr(cache, "keep", 0))
    kind = getattr(cache, "cache_kind", type(cache))
    return (kind, getattr(cache, "chunk_size", None), len(getattr(cache, "cache", ())))


def _ghost(cache: Cache, own_by_kind: dict[tuple[Any, ...], Cache], place: CachePlace) -> Cache:
    if is_list(cache):
        cache.caches = tuple(_ghost(one, own_by_kind, place) for one in cache.caches)
        return cache
    own = own_by_kind.get(kind_of(cache))
    if own is not None:
        return _Ghost(own)
    cache.__class__ = _derived(_Lone, cache.__class__)
    cache.ghost_place = place
    return cache


def _refuse_write(ghost: Cache, *_args: Any, **_kwargs: Any) -> None:
    raise AssertionError(f"a layer of another stage wrote to its {type(ghost).__name__}")


class _Ghost(StandIn):
    """A read-only view of an own cache, which stands in the place of another stage's cache of the same kind."""

    __setitem__ = update_and_fetch = _refuse_write


class _Lone:
    """A ghost whose kind has no own cache: it is empty, and its offset is the sequence's position."""

    offset = property(lambda ghost: ghost.ghost_place.position, lambda _ghost, _value: None)
    __setitem__ = update_and_fetch = _refuse_write


class _Shared:
    """A cache that keeps the last keys and values written in ``stored``. If ``received`` has some, it stores these."""

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        keys, values = self.received.get(0, keys), self.received.get(1, values)
        self.received, self.stored = dict[int, mx.array](), (keys, values)
        base: Any = super()
        return base.update_and_fetch(keys, values)


def share(cache: Cache) -> None:
    """Make a cache a shared one (``_Shared``)."""
    if not hasattr(cache, "received"):
        cache.__class__ = _derived(_Shared, cache.__class__)
        cache.received, cache.stored = {}, ()
