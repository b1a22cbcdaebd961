"""Stores the keys and values of sequences that decode together in common arrays, so that one call attends for all.

    layer i     keys [B, heads, room, d]          member    length
                |#########........|               0          9
                |############.....|               1         12

As long as the members of a *cohort* stay the same, a step writes one position of each and attends once, with neither a
loop nor a copy. When a member joins or leaves, the arrays are rebuilt. Sums of members of equal length are bitwise
equal to each member's alone. Shorter members are padded to the longest and masked, which changes the order of addition.
A member's own caches are empty and do not count its tokens; any other use of the member first calls ``release``, which
returns its arrays to it.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from splitinfer.core.kv.growth import BLOCK, room
from splitinfer.core.picture import Picture, grid_positions
from splitinfer.models.caches.caches import Cache, CachePlace, arrays_of, arrays_within, trim
from splitinfer.models.caches.growing import fitted
from splitinfer.models.caches.quantised import attention
from splitinfer.models.memory import on_gpu


class SequenceCaches:
    """The caches of one sequence on this stage. ``full``: the full-length list that the model indexes, then the caches
    of the stage's ``heads``. ``own``: the caches in it that the stage's layers write to. ``heads_at``: the number of
    tokens whose entries the heads' caches hold; ``tail``: what a drafter needs of the slice before. ``pictures``: those
    among the sequence's tokens; its positions depend on them."""

    def __init__(self, full: list[Cache], own: list[Cache], place: CachePlace, heads: Sequence[Cache] = ()) -> None:
        self.full, self.own, self.place = full, own, place
        self.heads, self.heads_at, self.tail = list(heads), 0, cast(Any, None)
        self.cohort: Cohort | None = None
        self.pictures: tuple[Picture, ...] = ()

    def arrays(self) -> list[mx.array]:
        """Return all arrays of its own caches; they must be evaluated after a step."""
        own = self.own if self.cohort is None else self.cohort.others_of(self)
        return [array for cache in (*own, *self.heads) for array in arrays_of(cache)]

    @property
    def has_grids(self) -> bool:
        """Whether its tokens' positions have three dimensions."""
        return any(picture.has_grid for picture in self.pictures)

    def positions(self, start: int, end: int) -> mx.array:
        """Return the positions of its tokens [start, end), as [1, n], or [3, 1, n] if it ``has_grids``."""
        if not self.has_grids:
            return mx.arange(start, end)[None]
        return mx.array(grid_positions(self.pictures, start, end), dtype=mx.int32).T[:, None]

    @contextmanager
    def seeing_both_ways(self, start: int, count: int) -> Iterator[None]:
        """Let the rows of one picture see each other, in the masks that the caches make for the next ``count`` rows
        from position ``start``, if the model attends to pictures this way."""
        end = start + count
        spans = [one for one in self.pictures if one.is_whole and one.start < end and start < one.end]
        caches = self.full if spans and count > 1 else []
        try:
            for cache in caches:
                cache.make_mask = partial(_both_ways, cache.make_mask, spans, end)
            yield
        finally:
            for cache in caches:
                cache.__dict__.pop("make_mask", None)

    def rewind_heads(self, to: int) -> None:
        """Drop the heads' entries of the tokens from position ``to`` on. A state does not change: no wrong token is in
        it."""
        for cache in self.heads:
            trim(cache, max(0, self.heads_at - to))
        self.heads_at = min(self.heads_at, to)

    def release(self) -> None:
        """Take the keys and values back from the cohort, if the sequence is in one."""
        if self.cohort is not None:
            self.cohort.release(self)

    def rewind(self, back: int) -> bool:
        """Roll back by ``back`` tokens and return whether every cache could. In a cohort only the lengths change:
        nothing is copied, and entries beyond the length are masked until they are overwritten."""
        own = self.own if self.cohort is None else self.cohort.others_of(self)
        if not all(trim(cache, back) for cache in own):
            return False
        self.place.position -= back
        return True

    def close(self) -> None:
        """Leave the cohort, if the sequence is in one, because the sequence has ended."""
        if self.cohort is not None:
            self.cohort.forget(self)

    def kv_cache(self, place: int) -> Cache:
        """Return the cache at a place of the list, for reading; at a cohort's place, a view of the cohort's arrays."""
        if self.cohort is not None and place in self.cohort.places:
            return self.cohort.view(self, place)
        return self.full[place]


def _both_ways(make: Callable[..., mx.array], spans: Sequence[Picture], end: int, n: int, **asked: Any) -> mx.array:
    """Return a cache's mask for the ``n`` rows before position ``end``; rows of a picture in ``spans`` see all of
    it."""
    mask = make(n, **{**asked, "return_array": True})
    rows, keys = mx.arange(end - n, end)[:, None], mx.arange(end - mask.shape[-1], end)
    for span in spans:
        mask = mask | ((rows >= span.start) & (rows < span.end) & (keys >= span.start) & (keys < span.end))
    return mask


def share_calls(lengths: Sequence[int], *, pads: bool) -> list[list[int]]:
    """Return the indices of decoding sequences in groups; each group attends in one call.

    Without ``pads``, sequences of a group have equal lengths. Otherwise their lengths are within a quarter of each
    other, so padding costs at most that in memory and time. Up to ``BLOCK`` tokens all take the same room anyway.

    >>> share_calls([9, 9, 12, 9], pads=False), share_calls([9, 9, 12, 40], pads=True)
    ([[0, 1, 3], [2]], [[0, 1, 2, 3]])
    """
    groups: dict[Hashable, list[int]] = {}
    for i, length in enumerate(lengths):
        key = int(math.log(max(length, BLOCK)) / math.log(1.25)) if pads else length
        groups.setdefault(key, []).append(i)
    return list(groups.values())


class Cohort:
    """Stores the plain caches of ``members`` (sequences), at ``places`` of their lists, in common arrays."""

    def __init__(self, members: Sequence[SequenceCaches], places: Sequence[int]) -> None:
        self.members = tuple(members)
        self.places = tuple(places)
        before = {id(member.cohort): member.cohort for member in members if member.cohort is not None}
        self._kv = self._gather()
        for member in members:
            self.hold(member)
        for cohort in before.values():
            cohort.dissolve()
        inside = {id(members[0].full[place]) for place in self.places}
        self._others = [i for i, cache in enumerate(members[0].own) if id(cache) not in inside]
        self._folds_heads = not on_gpu()
        self.begin_step()

    def hold(self, member: SequenceCaches) -> None:
        """Let a member's own caches be empty at the places, because its keys and values are in the arrays."""
        member.cohort = self
        for place in self.places:
            member.full[place].keys = member.full[place].values = None

    def others_of(self, member: SequenceCaches) -> list[Cache]:
        """Return a member's own caches that are not in the arrays."""
        return [member.own[i] for i in self._others] if self._others else []

    def row_of(self, member: SequenceCaches) -> int:
        """Return the row of a member's keys and values in the arrays."""
        return next(i for i, one in enumerate(self.members) if one is member)

    def begin_step(self) -> None:
        """Read each member's position, before a step that computes one position of each."""
        lengths = tuple(member.place.position for member in self.members)
        self._used = max(lengths) + 1
        self._is_even = min(lengths) + 1 == self._used
        self._masks: dict[tuple[int, ...], mx.array] = {}
        self._all = (slice(None), slice(None), slice(self._used))
        self._last = (slice(None), slice(None), slice(self._used - 1, self._used))
        if not self._is_even:
            self._at = mx.array(lengths, dtype=mx.int32)[:, None, None, None]

    def store(self, place: int, k: mx.array, v: mx.array) -> Any:
        """Append each member's new [B, kv heads, 1, d] keys and values. Return all, [B, kv heads, longest, d]."""
        like, (keys, values) = self.members[0].full[place], self._kv[place]
        k, v = like.encode(k, v)
        keys, values = self._kv[place] = self._write(like.phase, keys, k), self._write(like.phase, values, v)
        return like.decode(self._read(keys), self._read(values))

    def attend(self, q: mx.array, k: Any, v: Any, scale: float, sinks: mx.array | None) -> mx.array:
        """Return attention [B, heads, 1, d] of one query per member over what ``store`` returned."""
        heads = q.shape[1]
        if sinks is None and self._folds_heads:
            # Heads that share keys become rows of one product: MLX's CPU backend would read the keys once per head.
            kv_heads = k.shape[1]
            q = q.reshape(q.shape[0], kv_heads, heads // kv_heads, q.shape[-1])
        y = attention(q, k, v, scale, self._mask(q.shape[1:3]), sinks)
        return y if y.shape[2] == 1 else y.reshape(y.shape[0], heads, 1, y.shape[-1])

    def _mask(self, rows: tuple[int, ...]) -> mx.array | None:
        """Return which keys each member sees, bool [B, *rows, longest], or ``None`` if all. ``rows``: heads, rows of
        each.

        Each step makes it once, for all heads: MLX's kernel would copy a mask that the heads share in every layer.
        """
        if self._is_even:
            return None
        if rows not in self._masks:
            mask = mx.arange(self._used) <= self._at
            self._masks[rows] = mx.contiguous(mx.broadcast_to(mask, (len(self.members), *rows, self._used)))
        return self._masks[rows]

    def arrays(self) -> list[mx.array]:
        """Return all stored arrays."""
        return arrays_within(self._kv)

    def view(self, member: SequenceCaches, place: int) -> Cache:
        """Return a member's keys and values at a place without copying, for reading until the next step."""
        row, cache = self.row_of(member), copy(member.full[place])
        cache.offset = member.place.position
        cache.keys, cache.values = tree_map(lambda array: array[row : row + 1], self._kv[place])
        return cache

    def release(self, member: SequenceCaches) -> None:
        """Return a member's keys and values to it and remove it; the other members stay."""
        row = self.row_of(member)
        for place in self.places:
            cache = member.full[place]
            cache.offset = member.place.position
            # Gathered, not sliced: a slice would hold the arrays of the whole cohort.
            pick = partial(_picked, [row], room(max(cache.offset, 1), cache.phase))
            cache.keys, cache.values = tree_map(pick, self._kv[place])
        member.cohort = None
        mx.async_eval([(member.full[place].keys, member.full[place].values) for place in self.places])  # type: ignore[no-untyped-call]

    def forget(self, member: SequenceCaches) -> None:
        """Remove a member that has ended. Dissolve the cohort if fewer than half of its members are left."""
        member.cohort = None
        left = sum(one.cohort is self for one in self.members)
        if 2 * left < len(self.members):
            self.dissolve()

    def dissolve(self) -> None:
        """Release all remaining members, because a single one would keep the memory of all."""
        for member in self.members:
            if member.cohort is self:
                self.release(member)

    # -- arrays ------------------------------------------------------------------------------

    def _gather(self) -> dict[int, Any]:
        """Return the members' arrays side by side, each with room for the longest member's next tokens."""
        longest = max(member.place.position for member in self.members) + 1
        lengths = {place: room(longest, self.members[0].full[place].phase) for place in self.places}
        old = self.members[0].cohort
        if old is not None and all(member.cohort is old for member in self.members):
            rows = [old.row_of(member) for member in self.members]
            return {place: tree_map(partial(_picked, rows, lengths[place]), kv) for place, kv in old._kv.items()}
        for member in self.members:
            member.release()
        return {place: self._side_by_side(place, lengths[place]) for place in self.places}

    def _side_by_side(self, place: int, length: int) -> Any:
        kv = ((member.full[place].keys, member.full[place].values) for member in self.members)
        return tree_map(lambda *arrays: mx.concatenate([fitted(array, length) for array in arrays]), *kv)

    def _write(self, phase: float, old: Any, new: Any) -> Any:
        if isinstance(old, tuple):
            return tuple(self._write(phase, *both) for both in zip(old, new, strict=True))
        if self._used > old.shape[2]:
            old = fitted(old, room(self._used, phase))
        if not self._is_even:
            return mx.put_along_axis(old, self._at, new, axis=2)
        old[self._last] = new
        return old

    def _read(self, stored: Any) -> Any:
        return tuple(map(self._read, stored)) if isinstance(stored, tuple) else stored[self._all]


def _picked(rows: Sequence[int], length: int, array: mx.array) -> mx.array:
    """Return ``rows`` of an array [B, heads, tokens, d], with room for ``length`` tokens."""
    return fitted(array[mx.array(list(rows))], length)


def can_join(caches: SequenceCaches, places: Sequence[int]) -> bool:
    """Return whether a sequence has keys and values at every place, so that it can join a cohort."""
    return caches.cohort is not None or all(not caches.full[place].empty() for place in places)
