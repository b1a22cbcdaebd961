"""Runs many sequences in one step, their tokens as rows of one batch.

A step's T tokens, of any number of sequences, go through the model as [T, 1, d]: a batch of T with one position each.
Modules that treat rows alike read their weights once per step, and nothing is padded. Only code that touches a cache
must see sequences, and that is one call in each layer:

    q, k, v = projections of [T, 1, d]          all rows
    rope(q, offset), rope(k, offset)            a vector of T positions
    cache.update_and_fetch(k, v)                a RowCache, which returns placeholders (``NewKV``)
    scaled_dot_product_attention(q, k, v, ...)  replaced: the attention of each sequence, or cohort, is done here

A model that does anything else with placeholders fails while the graph is built, so no wrong number is ever computed. A
sub-module that cannot run this way (a recurrent state, MLA, its own attention) is called once for each sequence
(``each_sequence``). If even that fails, the model runs sequence by sequence.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.models.caches.caches import Cache, is_list
from splitinfer.models.caches.cohort import Cohort, SequenceCaches
from splitinfer.models.caches.quantised import Packed, attention
from splitinfer.models.caches.rollback import DraftedBlock
from splitinfer.models.library.layers import SOURCES, LayerWatch, children_watched

_SDPA = "scaled_dot_product_attention"


class NotByRows(Exception):
    """The model uses its caches in a way that a step of rows does not support."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's ``count`` rows of a step, from position ``start``. The last ``num_logits`` want logits. ``block``:
    the record for a rollback, if the rows are a block of drafts and the sequence has states."""

    caches: SequenceCaches
    start: int
    count: int
    num_logits: int = 0
    block: DraftedBlock | None = None


@dataclass(frozen=True, slots=True)
class RowsCall:
    """Parts that attend in one call: rows of the step from ``first`` on. ``cohort``: theirs, if they are several."""

    parts: tuple[SequenceRows, ...]
    first: int
    cohort: Cohort | None = None

    def apart(self) -> "Iterator[RowsCall]":
        """Yield a call for each part."""
        first = self.first
        for part in self.parts:
            yield RowsCall((part,), first)
            first += part.count


@dataclass(frozen=True)
class RowStep:
    """One step of rows: the groups of its parts, in the order of the rows. ``masks``: the masks made so far."""

    groups: tuple[RowsCall, ...]
    masks: dict[Any, "RowMask"] = field(default_factory=dict)
    _calls: dict[bool, list[RowsCall]] = field(default_factory=dict)  # by whether cohorts hold a place

    def calls(self, place: int) -> list[RowsCall]:
        """Return the calls of attention at a place of the cache list: one for each cohort that holds it, and one for
        each other part."""
        shared = place in self._places
        if shared not in self._calls:
            self._calls[shared] = [call for group in self.groups for call in ([group] if shared else group.apart())]
        return self._calls[shared]

    @cached_property
    def _places(self) -> Sequence[int]:
        return next((group.cohort.places for group in self.groups if group.cohort is not None), ())

    @property
    def parts(self) -> Iterator[SequenceRows]:
        """All parts, in the order of their rows."""
        return (part for group in self.groups for part in group.parts)

    @cached_property
    def offsets(self) -> mx.array:
        """The positions [T] of the rows."""
        return mx.array([part.start + i for part in self.parts for i in range(part.count)], dtype=mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """The positions of the rows, [T], or [3, T] if a part's positions have three dimensions."""
        if not any(part.caches.has_grids for part in self.parts):
            return self.offsets
        each = [part.caches.positions(part.start, part.start + part.count) for part in self.parts]
        return mx.concatenate([mx.broadcast_to(one, (3, 1, one.shape[-1])) for one in each], axis=-1)[:, 0]

    @cached_property
    def logit_rows(self) -> mx.array | None:
        """The indices [R] of the rows that want logits, ``None`` for all; the last row's index if no row does."""
        rows: list[int] = []
        at = 0
        for part in self.parts:
            at += part.count
            rows += range(at - part.num_logits, at)
        return None if len(rows) == at else mx.array(rows or [at - 1], dtype=mx.int32)


@dataclass(frozen=True, slots=True)
class ByPart:
    """A value that each part has of its own. Only modules that are called for each sequence can read it."""

    by_part: tuple[Any, ...]


class RowMask(ByPart):
    """The result of ``make_mask``: each part's own mask, made before the model writes to the caches."""

    @cached_property
    def hides(self) -> bool:
        """Whether any part has a mask."""
        return any(one is not None for one in self.by_part)


@dataclass(slots=True)
class NewKV:
    """A placeholder for the keys or values that a layer stores, until its attention reads them. ``fetched``: all keys
    and values of each call once the new ones are stored; another layer may attend to them."""

    cache: Any  # its ``attend`` stores them
    array: mx.array
    fetched: list[tuple[Any, Any]] | None = None


class RowCache:
    """The cache that a model gets at place ``index`` of its cache list during a step of rows.

    If that place holds a list of caches, each has a ``RowCache``; ``within`` is its index in that list.
    """

    def __init__(self, index: int, like: Cache, within: int | None = None) -> None:
        self._index, self._within, self._like, self._fresh = index, within, like.__class__, like
        self._step: RowStep | None = None
        inner = like.caches if within is None and is_list(like) else ()
        self._inner = [RowCache(index, cache, i) for i, cache in enumerate(inner)]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # models ask isinstance
        return self._like

    def bind(self, step: RowStep | None) -> None:
        """Set the step in progress, or ``None`` when it is over."""
        self._step = step
        for cache in self._inner:
            cache.bind(step)

    @property
    def step(self) -> RowStep:
        """The step in progress."""
        assert self._step is not None
        return self._step

    @property
    def offset(self) -> mx.array:
        """The positions [T] of the rows."""
        return self.step.offsets

    @property
    def _offset(self) -> int:
        """mlx-vlm's name for the largest position, which mlx-vlm would compute on the device."""
        return max(part.start + part.count for part in self.step.parts) - 1

    def make_mask(self, _n: int, **asked: Any) -> RowMask:
        """Return each part's mask, made by the part's own cache; of a cohort's members, by the first one's."""
        key = (self._index, self._within, tuple(asked.items()))
        if key not in self.step.masks:
            made = list[Any]()
            for call in self.step.calls(self._index):
                first = call.parts[0]
                made += [self.of(first).make_mask(first.count, **asked)] * len(call.parts)
            self.step.masks[key] = RowMask(tuple(made))
        return self.step.masks[key]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[NewKV, NewKV]:
        """Return placeholders for [T, heads, 1, d] keys and values, which ``attend`` stores."""
        return NewKV(self, keys), NewKV(self, values)

    def attend(
        self, queries: mx.array, keys: NewKV, values: NewKV, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Return [T, heads, 1, d]: each call's attention over its own keys and values, including the new ones."""
        if mask is not None and not isinstance(mask, RowMask):
            raise NotByRows("the model made a mask of its own")
        calls = self.step.calls(self._index)
        if keys.fetched is None:
            new = zip(calls, _cut(keys.array, calls), _cut(values.array, calls), strict=True)
            keys.fetched = [self._store(*one) for one in new]
        masks = iter(mask.by_part) if mask is not None and mask.hides else None
        outputs = list[mx.array]()
        for call, q, fetched in zip(calls, _cut(queries, calls), keys.fetched, strict=True):
            own = [None] if masks is None else [*islice(masks, len(call.parts))]
            if call.cohort is None:
                outputs.append(_attend(call.parts[0], q, *fetched, scale, own[0], sinks))
            elif any(one is not None for one in own):
                raise NotByRows("the model masks single rows over plain keys and values")
            else:
                outputs.append(call.cohort.attend(q, *fetched, scale, sinks))
        return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]

    def _store(self, call: RowsCall, k: mx.array, v: mx.array) -> tuple[Any, Any]:
        """Append a call's new keys and values, [n, heads, 1, d]. Return all of its cohort or part."""
        if call.cohort is not None:
            return cast("tuple[Any, Any]", call.cohort.store(self._index, k, v))
        (part,) = call.parts
        return cast("tuple[Any, Any]", self.of(part).update_and_fetch(_turned(part, k), _turned(part, v)))

    def of(self, part: SequenceRows) -> Cache:
        """Return the part's own cache at this place."""
        cache = part.caches.full[self._index]
        return cache if self._within is None else cache[self._within]

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._fresh, name):
            raise AttributeError(name)
        first, *others = (getattr(self.of(part), name) for part in self.step.parts)
        if (first is None or isinstance(first, bool | int | str)) and all(value == first for value in others):
            return first  # the value that each sequence alone would have
        raise NotByRows(f"the model reads {name} of a cache")

    def __getitem__(self, index: int) -> "RowCache":
        if not self._inner:
            raise NotByRows("the model reads a state that is not keys and values")
        return self._inner[index]


def _attend(
    part: SequenceRows, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Return the attention of one sequence's rows [n, heads, 1, d], computed as [1, heads, n, d]."""
    if mask is None and part.count > 1:
        raise NotByRows("many rows of one sequence came without a mask")
    return _turned(part, attention(_turned(part, q), k, v, scale, mask, sinks))


def _turned(part: SequenceRows, array: mx.array) -> mx.array:
    """Return a part's rows [n, heads, 1, d] as [1, heads, n, d], or the other way round."""
    return array if part.count == 1 else array.transpose(2, 1, 0, 3)


def _cut(array: mx.array, calls: Sequence[RowsCall]) -> Sequence[mx.array]:
    """Return the rows of each call."""
    return [array] if len(calls) == 1 else list(mx.split(array, [call.first for call in calls[1:]]))


@lru_cache
def _attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a library's attention function, extended to keys and values that are placeholders or packed."""

    def attend(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(keys, NewKV) and isinstance(values, NewKV):
            return cast(mx.array, keys.cache.attend(queries, keys, values, scale, mask, sinks))
        if isinstance(keys, Packed) and isinstance(values, Packed):
            return attention(queries, keys, values, scale, mask, sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def attend_by_rows(model: nn.Module) -> bool:
    """Replace the libraries' attention functions in the modules of a model's classes. Return whether any module uses
    one.

    They stay replaced, and pass calls of other models and other threads on to the libraries' own functions.
    """
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    bases = [sys.modules[f"{source}base"] for source in SOURCES if f"{source}base" in sys.modules]
    new = {getattr(one, _SDPA): _attention(getattr(one, _SDPA)) for one in bases}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith(SOURCES)]
    found = [m for m in modules if m not in bases and getattr(m, _SDPA, None) in (*new, *new.values())]
    for module in found:
        function = getattr(module, _SDPA)
        setattr(module, _SDPA, new.get(function, function))
    return bool(found)


# -- sub-modules that are called for each sequence ---------------------------------------------------


def each_sequence(module: Any, args: Any, kwargs: Any) -> Any:
    """Call a module with rows [T, 1, d] and a ``RowCache`` once for each sequence. Return the concatenated rows."""
    step = next(value.step for value in (*args, *kwargs.values()) if type(value) is RowCache)
    count, first, results = sum(part.count for part in step.parts), 0, []
    for number, part in enumerate(step.parts):
        own = partial(_argument_of, number, part, slice(first, first := first + part.count), count)
        given, named = tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()}
        block = part.block
        results.append(module(*given, **named) if block is None else block.call(module, given, named))
    return _concatenated(results)


def _argument_of(number: int, part: SequenceRows, rows: slice, count: int, value: Any) -> Any:
    """Return an argument for one sequence alone: its own rows as [1, n, ...], its own cache, or its own mask."""
    if type(value) is RowCache:
        return value.of(part)
    if isinstance(value, ByPart):
        return value.by_part[number]
    if isinstance(value, mx.array) and value.ndim >= 2 and value.shape[:2] == (count, 1):
        return value[rows].swapaxes(0, 1)
    return value


def _concatenated(results: Sequence[Any]) -> Any:
    """Return [T, 1, ...] from each sequence's [1, n, ...]. Tuples are concatenated part by part."""
    first = results[0]
    if any(isinstance(result, mx.array) and not mx.issubdtype(result.dtype, mx.floating) for result in results):
        return ByPart(tuple(results))  # each sequence's choice among its own tokens; None if it is too short
    if isinstance(first, mx.array):
        return mx.concatenate([result.swapaxes(0, 1) for result in results])
    if isinstance(first, tuple):
        return tuple(_concatenated(parts) for parts in zip(*results, strict=True))
    if all(result is None for result in results):
        return None
    raise NotByRows(f"a module returns {type(first).__name__} beside its rows")


@dataclass(frozen=True, slots=True)
class CacheConsumer:
    """A sub-module, ``holder[key]``, that takes the cache at ``place`` of the list."""

    holder: nn.Module
    key: str
    place: int


def find_cache_consumers(
    layers: Sequence[nn.Module], caches: Sequence[Cache], call: Callable[[], Any]
) -> list[CacheConsumer]:
    """Run ``call`` and return the children of ``layers`` that get one of ``caches`` as an argument."""
    places = {id(part): i for i, cache in enumerate(caches) for part in (cache, *getattr(cache, "caches", ()))}
    children = [(layer, key) for layer in layers for key, child in layer.items() if isinstance(child, nn.Module)]
    found: dict[tuple[int, str], CacheConsumer] = {}

    def noting(layer: nn.Module, key: str) -> LayerWatch:
        def note(child: Any, args: Any, kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if id(value) in places:
                    found[id(layer), key] = CacheConsumer(layer, key, places[id(value)])
            return child(*args, **kwargs)

        return note

    with children_watched([(layer, key, noting(layer, key)) for layer, key in children]):
        call()
    return list(found.values())
