"""What building a step's graph changes in the caches of its sequences, taken before and put back.

MLX computes nothing while a graph is built, but caches move on: offsets grow, and the arrays that they name become
those of the graph. Handles of the arrays before cost nothing. While they are held, though, computing the graph copies
what it would write in place; so a snapshot is dropped before that.
"""

import copy
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from splitinfer.models.caches import is_list
from splitinfer.models.cohort import SequenceCaches

_PLAIN = (int, float, bool, str, type(None))  # most values, and a call for each of them would cost more than the rest


class Snapshot:
    """The state of some sequences' caches, and of the cohorts that they are in."""

    def __init__(self, sequences: Iterable[SequenceCaches]) -> None:
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}
        for sequence in sequences:
            self._take(sequence.place)
            if id(sequence) in self._before:
                continue  # it was taken with its cohort
            if sequence.cohort is not None:
                self._take(sequence.cohort)
            for member in (sequence, *(sequence.cohort.members if sequence.cohort else ())):
                self._take(member)
                for cache in member.own:
                    self._take_cache(cache)

    def _take_cache(self, cache: Any) -> None:
        self._take(cache)
        for one in cache.caches if is_list(cache) else ():
            self._take_cache(one)

    def _take(self, thing: Any) -> None:
        if id(thing) not in self._before:
            before = {name: v if type(v) in _PLAIN else _handle(v) for name, v in vars(thing).items()}
            self._before[id(thing)] = (thing, before)

    def restore(self) -> None:
        """Put everything back. Only once, because handles are handed out."""
        for thing, before in self._before.values():
            vars(thing).clear()
            vars(thing).update(before)


def _handle(value: Any) -> Any:
    """The value, with arrays replaced by handles of their own, which assignments to the originals do not change."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_handle, value))
    if type(value) is dict:
        return {key: _handle(one) for key, one in value.items()}
    return value
