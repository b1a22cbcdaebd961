"""Many sequences in one step: their tokens as rows.

A step's T tokens, of however many sequences, go through the model as [T, 1, d]: a batch of T with one
position each. Embeddings, norms, linear layers, MLPs and experts treat rows alike, so weights are read
once a step, whoever the rows belong to, and nothing is padded. Only what touches a cache must see
sequences, and that is one call in each layer:

    q, k, v = projections of [T, 1, d]          all rows
    rope(q, offset), rope(k, offset)            a vector of T positions
    cache.update_and_fetch(k, v)                a RowCache takes the place of the layer's cache ...
    scaled_dot_product_attention(q, k, v, ...)  ... and the attention of each sequence is done here

The cache list holds ``RowCache`` objects, which know every sequence of the step; what they return for
keys and values is no array but a note of where those are, so a model that does anything else with them
fails while the graph is built, and no wrong number is ever computed. The function that a model's module
imported as ``scaled_dot_product_attention`` is replaced by one that knows those notes and hands everything
else to mlx-lm's.

    rows      0 1 2 3 | 4 | 5 6 7 8 9 ...
    attention cohort  one  a chunk              several sequences of one position each: one call (``cohort``)

Some sub-modules cannot be run so: they keep a recurrent state, branch on the number of positions (MLA), or
attend by other means. Where such a module takes the cache as an argument, it alone is called once for each
sequence (``EachSequence``), with that sequence's rows as [1, n, d] and its own cache, and everything around
it keeps its rows together. A model where even that fails is run sequence by sequence.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.models.caches import Cache
from splitinfer.models.cohort import Cohort, SequenceCaches
from splitinfer.models.layers import StandIn
from splitinfer.models.mlx_lm import CacheList, base
from splitinfer.models.quantised import Packed, attention

_SDPA = "scaled_dot_product_attention"


class NotByRows(Exception):
    """The model does something with its caches that a step of rows does not know."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's ``count`` rows of a step, from position ``start``; the last ``num_logits`` want logits."""

    caches: SequenceCaches
    start: int
    count: int
    num_logits: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Parts whose attention is one call: rows [first, last) of the step. ``cohort`` where they are several."""

    parts: tuple[Part, ...]
    first: int
    last: int
    cohort: Cohort | None = None


@dataclass(frozen=True)
class RowStep:
    """One step of rows: who is in it, in the order of the rows."""

    groups: tuple[Group, ...]
    masks: dict[Any, "RowMask"] = field(default_factory=dict)

    @property
    def parts(self) -> Iterator[Part]:
        """All parts, in the order of their rows."""
        return (part for group in self.groups for part in group.parts)

    @cached_property
    def offsets(self) -> mx.array:
        """[T] positions."""
        return mx.array([part.start + i for part in self.parts for i in range(part.count)], dtype=mx.int32)

    @cached_property
    def logit_rows(self) -> mx.array | None:
        """[R] rows that want logits; of none, the last one, whose logits nobody reads."""
        rows: list[int] = []
        at = 0
        for part in self.parts:
            at += part.count
            rows += range(at - part.num_logits, at)
        return None if len(rows) == at else mx.array(rows or [at - 1], dtype=mx.int32)


@dataclass(frozen=True, slots=True)
class RowMask:
    """What ``make_mask`` returned: each part's own mask, made when the model asked, before it writes."""

    by_part: tuple[Any, ...]


@dataclass(slots=True)
class _Note:
    """Stands for the keys or values that a layer stores, until its attention asks for them. ``fetched``: each
    part's keys and values once they are stored; another layer may attend to them again."""

    cache: "RowCache"
    array: mx.array
    fetched: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)


class RowCache:
    """What a model finds at place ``index`` of its cache list during a step of rows.

    A list of caches in one place has one of these for each; ``within`` is its number there.
    """

    def __init__(self, index: int, like: Cache, within: int | None = None) -> None:
        self._index, self._within, self._like = index, within, like.__class__
        self._step: RowStep | None = None
        inner = like.caches if within is None and isinstance(like, CacheList) else ()
        self._inner = [RowCache(index, cache, i) for i, cache in enumerate(inner)]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # models ask isinstance
        return self._like

    def bind(self, step: RowStep | None) -> None:
        """Serve this step."""
        self._step = step
        for cache in self._inner:
            cache.bind(step)

    @property
    def step(self) -> RowStep:
        """The step under way."""
        assert self._step is not None
        return self._step

    @property
    def offset(self) -> mx.array:
        """[T] positions, one a row."""
        return self.step.offsets

    def make_mask(self, _n: int, **asked: Any) -> RowMask:
        """Each part's mask, as its own cache makes it."""
        key = (self._index, self._within, tuple(asked.items()))
        if key not in self.step.masks:
            made = [self.of(part).make_mask(part.count, **asked) for part in self.step.parts]
            self.step.masks[key] = RowMask(tuple(made))
        return self.step.masks[key]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Note, _Note]:
        """Note [T, heads, 1, d] keys and values; they are stored when the attention comes."""
        return _Note(self, keys), _Note(self, values)

    def attend(
        self, queries: mx.array, keys: _Note, values: _Note, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """[T, heads, 1, d]: each group's attention over its own keys and values, the new ones among them."""
        if mask is not None and not isinstance(mask, RowMask):
            raise NotByRows("the model made a mask of its own")
        masks, outputs = None if mask is None else iter(mask.by_part), []
        for group in self.step.groups:
            own = [None if masks is None else next(masks) for _ in group.parts]
            rows, first = slice(group.first, group.last), group.first
            cohort = group.cohort
            if cohort is not None and self._index in cohort.places:
                if any(one is not None for one in own):
                    raise NotByRows("the model masks single rows over plain keys and values")
                if rows.start not in keys.fetched:
                    keys.fetched[rows.start] = cohort.store(self._index, keys.array[rows], values.array[rows])
                outputs.append(cohort.attend(queries[rows], *keys.fetched[rows.start], scale, sinks))
                continue
            for part, part_mask in zip(group.parts, own, strict=True):
                rows = slice(first, first := first + part.count)
                if rows.start not in keys.fetched:
                    keys.fetched[rows.start] = self._store(part, keys.array[rows], values.array[rows])
                outputs.append(_attend(part, queries[rows], *keys.fetched[rows.start], scale, part_mask, sinks))
        return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]

    def _store(self, part: Part, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Put one sequence's new [n, heads, 1, d] into its cache; all of its [1, heads, tokens, d]."""
        fetched: tuple[mx.array, mx.array] = self.of(part).update_and_fetch(
            k.transpose(2, 1, 0, 3), v.transpose(2, 1, 0, 3)
        )
        return fetched

    def of(self, part: Part) -> Cache:
        """The part's own cache in this place."""
        cache = part.caches.full[self._index]
        return cache if self._within is None else cache[self._within]

    def __getattr__(self, name: str) -> Any:
        raise NotByRows(f"the model looks at {name} of a cache")

    def __getitem__(self, index: int) -> "RowCache":
        if not self._inner:
            raise NotByRows("the model looks at a state that is not keys and values")
        return self._inner[index]


def _attend(
    part: Part, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """One sequence's rows [n, heads, 1, d] as [1, heads, n, d], and back."""
    if mask is None and part.count > 1:
        raise NotByRows("many rows of one sequence came without a mask")
    return attention(q.transpose(2, 1, 0, 3), k, v, scale, mask, sinks).transpose(2, 1, 0, 3)


_original = base.scaled_dot_product_attention


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function, but for keys and values that are notes, or in few bits."""
    if isinstance(keys, _Note) and isinstance(values, _Note):
        return keys.cache.attend(queries, keys, values, scale, mask, sinks)
    if isinstance(keys, Packed) and isinstance(values, Packed):
        return attention(queries, keys, values, scale, mask, sinks)
    return cast(mx.array, _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks))


def attend_by_rows(model: nn.Module) -> bool:
    """Put our attention in the place of mlx-lm's in the modules of a model's classes; whether any has it.

    It stays there: other models, and other threads' calls, find mlx-lm's own behind it.
    """
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("mlx_lm.models.")]
    found = [m for m in modules if m is not base and getattr(m, _SDPA, None) in (_original, _attention)]
    for module in found:
        setattr(module, _SDPA, _attention)
    return bool(found)


# -- sub-modules that are called for each sequence ---------------------------------------------------


class EachSequence(StandIn):
    """Calls the real module once for each sequence of the step, and puts the rows together again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Like the module's own, for [T, 1, d] rows and a RowCache among the arguments."""
        step = next(value.step for value in (*args, *kwargs.values()) if type(value) is RowCache)
        count, first, results = sum(part.count for part in step.parts), 0, []
        for number, part in enumerate(step.parts):
            own = partial(_own, number, part, slice(first, first := first + part.count), count)
            results.append(self._real(*map(own, args), **{key: own(value) for key, value in kwargs.items()}))
        return _together(results)


def _own(number: int, part: Part, rows: slice, count: int, value: Any) -> Any:
    """An argument as one sequence would have it: [1, n, ...] of its own rows, its own cache and mask."""
    if type(value) is RowCache:
        return value.of(part)
    if isinstance(value, RowMask):
        return value.by_part[number]
    if isinstance(value, mx.array) and value.ndim >= 2 and value.shape[:2] == (count, 1):
        return value[rows].swapaxes(0, 1)
    return value


def _together(results: Sequence[Any]) -> Any:
    """[T, 1, ...] of each sequence's [1, n, ...]; of a tuple, each part."""
    first = results[0]
    if isinstance(first, mx.array):
        return mx.concatenate([result.swapaxes(0, 1) for result in results])
    if isinstance(first, tuple):
        return tuple(_together(parts) for parts in zip(*results, strict=True))
    if first is None:
        return None
    raise NotByRows(f"a module returns {type(first).__name__} beside its rows")


@dataclass(frozen=True, slots=True)
class CacheConsumer:
    """A sub-module that takes the cache at ``place`` of the list: ``holder[key]``."""

    holder: nn.Module
    key: str
    place: int


class _Spotter(StandIn):
    """Notes which caches the real module is called with."""

    def __init__(self, real: Any, note: Callable[[Any], None]) -> None:
        super().__init__(real)
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            self._note(value)
        return self._real(*args, **kwargs)


def find_cache_consumers(
    layers: Sequence[nn.Module], caches: Sequence[Cache], call: Callable[[], Any]
) -> list[CacheConsumer]:
    """The children of ``layers`` that are given one of ``caches`` while ``call`` runs."""
    places = {id(part): i for i, cache in enumerate(caches) for part in (cache, *getattr(cache, "caches", ()))}
    children = [(layer, key) for layer in layers for key, child in layer.items() if isinstance(child, nn.Module)]
    found: dict[tuple[int, str], CacheConsumer] = {}

    def spotter(layer: nn.Module, key: str) -> _Spotter:
        def note(value: Any) -> None:
            if id(value) in places:
                found[id(layer), key] = CacheConsumer(layer, key, places[id(value)])

        return _Spotter(layer[key], note)

    with children_replaced([(layer, key, spotter(layer, key)) for layer, key in children]):
        call()
    return list(found.values())


@contextmanager
def children_replaced(stand_ins: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Other things in the places of some layers' children."""
    before = [(holder, key, holder[key]) for holder, key, _ in stand_ins]
    try:
        for holder, key, stand_in in stand_ins:
            holder[key] = stand_in
        yield
    finally:
        for holder, key, child in before:
            holder[key] = child
