"""Sequences that decode together keep their keys and values side by side, so that one call attends for all.

::

    layer i     keys [B, heads, room, d]          member    length
                |#########........|               0          9
                |############.....|               1         12
                |#######..........|               2          7

A *cohort* is made of sequences that decode in one step again and again; as long as its members stay
the same, a step writes one position of each and attends once, with neither a loop nor a copy. When one
joins or leaves, the arrays are made anew: a copy of the cohort, once for many steps.

Which sequences may share a call is ``share_calls``. Members of equal length need no mask, and their sums
are those of each alone to the last bit. Others are padded to the longest and masked: a vector unit then
adds in another order, so where arithmetic is exact for every number of rows (the reference BLAS of MLX's
Linux wheels) that is left alone.

While a sequence is in a cohort its own caches are empty shells that know only their offset; ``release``
gives them their arrays back, and everything else that can be done with a sequence begins with that.
"""

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from splitinfer.models.caches import Cache, Place
from splitinfer.models.memory import on_gpu
from splitinfer.models.mlx_lm import KVCache
from splitinfer.models.quantised import QuantisedKVCache, attention

STEP = 256  # tokens of room by which a cohort's arrays grow, as mlx-lm's caches do


class SequenceCaches:
    """One sequence's caches on this stage: the full-length list for the model, the own ones for us."""

    def __init__(self, full: list[Cache], own: list[Cache], place: Place) -> None:
        self.full, self.own, self.place = full, own, place
        self.cohort: Cohort | None = None

    def release(self) -> None:
        """Take the keys and values back from the cohort, if the sequence is in one."""
        if self.cohort is not None:
            self.cohort.release(self)

    def kv_cache(self, place: int) -> Cache:
        """The cache at a place of the list, to be read: where a cohort keeps its arrays, a view of them."""
        if self.cohort is not None and place in self.cohort.places:
            return self.cohort.view(self, place)
        return self.full[place]


def share_calls(lengths: Sequence[int], *, exact: bool) -> list[list[int]]:
    """Which of several decoding sequences attend in one call: indices, in groups.

    ``exact``: only equal lengths, else those within a quarter of each other, so that padding costs no more than
    that in memory and in time; up to ``STEP`` tokens all have the same room anyway.

    >>> share_calls([9, 9, 12, 9], exact=True), share_calls([9, 9, 12, 40], exact=False)
    ([[0, 1, 3], [2]], [[0, 1, 2, 3]])
    """
    groups: dict[Hashable, list[int]] = {}
    for i, length in enumerate(lengths):
        key = length if exact else int(math.log(max(length, STEP)) / math.log(1.25))
        groups.setdefault(key, []).append(i)
    return list(groups.values())


class Cohort:
    """``members``: sequences whose plain caches, at ``places`` of their lists, are kept together here."""

    def __init__(self, members: Sequence[SequenceCaches], places: Sequence[int]) -> None:
        self.members = tuple(members)
        self.places = tuple(places)
        before = {id(member.cohort): member.cohort for member in members if member.cohort is not None}
        self._kv = self._gather()
        for member in members:
            self._take_over(member)
        for cohort in before.values():
            cohort.dissolve()
        self._lengths = tuple(0 for _ in members)
        self._rows = mx.arange(len(members))
        self.begin_step()

    def consists_of(self, members: Sequence[SequenceCaches]) -> bool:
        """Whether these are its members, in this order."""
        return len(members) == len(self.members) and all(a is b for a, b in zip(members, self.members, strict=True))

    def begin_step(self) -> None:
        """Look at where each member stands; one position of each is about to be computed."""
        self._lengths = tuple(member.place.position for member in self.members)
        self._used = max(self._lengths) + 1
        self._is_even = min(self._lengths) + 1 == self._used
        self._mask: mx.array | None = None
        if not self._is_even:
            self._at = mx.array(self._lengths, dtype=mx.int32)
            self._mask = (mx.arange(self._used)[None] <= self._at[:, None])[:, None, None]

    def store(self, place: int, k: mx.array, v: mx.array) -> Any:
        """Put each member's new [B, kv heads, 1, d] keys and values in; all [B, kv heads, longest, d] of them."""
        like = self.members[0].full[place]
        new = like.encode(k, v) if isinstance(like, QuantisedKVCache) else (k, v)
        self._kv[place] = tree_map(self._write, self._kv[place], new)
        for member in self.members:
            member.full[place].offset += 1
        used = tree_map(lambda array: array[:, :, : self._used], self._kv[place])
        return like.decode(*used) if isinstance(like, QuantisedKVCache) else used

    def attend(self, q: mx.array, k: Any, v: Any, scale: float, sinks: mx.array | None) -> mx.array:
        """[B, heads, 1, d] of one query each, over what ``store`` returned."""
        if sinks is None and not on_gpu():
            # Heads that share keys become rows of one product: MLX's CPU backend would read the keys for each.
            q = q.reshape(k.shape[0], k.shape[1], -1, q.shape[-1])
        y = attention(q, k, v, scale, self._mask, sinks)
        return y.reshape(y.shape[0], -1, 1, y.shape[-1])

    def arrays(self) -> list[mx.array]:
        """Everything kept here."""
        return [array for _, array in tree_flatten(list(self._kv.values()))]

    def view(self, member: SequenceCaches, place: int) -> Cache:
        """A member's keys and values at a place, not copied. Not to be written to, nor kept."""
        row = next(i for i, m in enumerate(self.members) if m is member)
        like = member.full[place]
        cache = QuantisedKVCache(like.format) if isinstance(like, QuantisedKVCache) else KVCache()
        cache.keys, cache.values = tree_map(lambda array: array[row : row + 1], self._kv[place])
        cache.offset = like.offset
        return cache

    def release(self, member: SequenceCaches) -> None:
        """Give a member its keys and values back; the others stay."""
        row = next(i for i, m in enumerate(self.members) if m is member)
        for place in self.places:
            cache = member.full[place]
            room = -(-max(cache.offset, 1) // STEP) * STEP
            # Gathered, not sliced: a slice would keep the arrays of the whole cohort.
            cache.keys, cache.values = tree_map(partial(_picked, [row], room), self._kv[place])
        member.cohort = None
        mx.async_eval([(member.full[place].keys, member.full[place].values) for place in self.places])  # type: ignore[no-untyped-call]

    def forget(self, member: SequenceCaches) -> None:
        """A member is gone for good. Where few are left, they take what is theirs and the rest goes."""
        member.cohort = None
        left = sum(one.cohort is self for one in self.members)
        if 2 * left < len(self.members):
            self.dissolve()

    def dissolve(self) -> None:
        """Release who is still here: one of them would keep the bytes of all."""
        for member in self.members:
            if member.cohort is self:
                self.release(member)

    # -- inside ------------------------------------------------------------------------------

    def _gather(self) -> dict[int, Any]:
        """The members' arrays side by side, each with room for the longest and a little more."""
        room = -(-(max(member.place.position for member in self.members) + 1) // STEP) * STEP
        old = self.members[0].cohort
        if old is not None and all(member.cohort is old for member in self.members):
            rows = [next(i for i, m in enumerate(old.members) if m is member) for member in self.members]
            return {place: tree_map(partial(_picked, rows, room), kept) for place, kept in old._kv.items()}
        for member in self.members:
            member.release()
        return {place: self._side_by_side(place, room) for place in self.places}

    def _side_by_side(self, place: int, room: int) -> Any:
        first, *others = ((member.full[place].keys, member.full[place].values) for member in self.members)
        return tree_map(lambda *arrays: mx.concatenate([_fit(array, room) for array in arrays]), first, *others)

    def _take_over(self, member: SequenceCaches) -> None:
        member.cohort = self
        for place in self.places:
            member.full[place].keys = member.full[place].values = None

    def _write(self, old: mx.array, new: mx.array) -> mx.array:
        if self._used > old.shape[2]:
            old = _fit(old, old.shape[2] + STEP)
        if self._is_even:
            old[:, :, self._used - 1 : self._used] = new
        else:
            old[self._rows, :, self._at] = new[:, :, 0]
        return old


def _picked(rows: Sequence[int], room: int, array: mx.array) -> mx.array:
    """Some rows of [B, .., tokens, d], with room for so many tokens."""
    return _fit(array[mx.array(list(rows))], room)


def _fit(array: mx.array, room: int) -> mx.array:
    """[.., tokens, d] cut or filled up with zeros to ``room`` tokens."""
    batch, heads, here, dim = array.shape
    if here >= room:
        return array[:, :, :room]
    return mx.concatenate([array, mx.zeros((batch, heads, room - here, dim), array.dtype)], axis=2)


def can_join(caches: SequenceCaches, places: Sequence[int]) -> bool:
    """Whether a sequence has keys and values at every place, so that they can be put beside others."""
    return caches.cohort is not None or all(not caches.full[place].empty() for place in places)
