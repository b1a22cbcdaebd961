"""Decides which of several models are in memory: from the loaded, requested and idle models and the room, the next
step.

A server offers more models than its machines hold. Three things bound the loaded models: the bytes of the coordinator's
machine, the workers (each serves one pipeline at a time), and a number that the operator may give.

    a model is requested and fits beside the others  load it
    it does not fit                                  unload the models idle longest until it fits: a swap
    a model that must go still answers               let it finish; new requests for it wait
    a model was idle for ``ttl`` seconds             unload it

A model in use is never unloaded. The request that waited longest comes first, so every request gets its turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """One model. ``needs``: bytes on the coordinator's machine: weights and, once it is loaded, its room for KV.
    ``workers``: of its stages, by any unique name. ``num_using``: requests under way. ``rested_since``: when the last
    one ended, in seconds. ``has_failed``: the model must be loaded again."""

    name: str
    needs: int
    workers: frozenset[str] = frozenset()
    is_loaded: bool = False
    num_using: int = 0
    rested_since: float = 0.0
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """``room``: bytes, with nothing loaded. ``most``: models at a time; ``None``: as many as fit. ``ttl``: seconds that
    a model may be idle; ``None``: for ever."""

    room: int
    most: int | None = None
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The next step: ``unload`` these models, then ``load`` that one. ``leaving``: models that must go and accept no
    new request."""

    unload: tuple[str, ...] = ()
    load: str | None = None
    leaving: frozenset[str] = frozenset()


def decide(models: Sequence[Resident], waiting: Sequence[str], bounds: Bounds, now: float) -> Change:
    """Return the next step at ``now``, in seconds. ``waiting``: the models of waiting requests, the oldest first; they
    are not loaded, or must go."""
    loaded = [each for each in models if each.is_loaded]
    ttl = math.inf if bounds.ttl is None else bounds.ttl
    rested = [each for each in loaded if each.num_using == 0 and (each.has_failed or now - each.rested_since >= ttl)]
    if not waiting:
        return Change(tuple(each.name for each in rested))
    first = next(each for each in models if each.name == waiting[0])
    if first.is_loaded and not first.has_failed:  # it had to go for another model, which nobody wants any more
        return Change(load=first.name)
    going = _in_the_way(first, [each for each in loaded if each not in rested], bounds)
    if any(each.num_using for each in going):
        return Change(tuple(each.name for each in rested), leaving=frozenset(each.name for each in going))
    return Change(tuple(each.name for each in (*rested, *going)), first.name)


def _in_the_way(wanted: Resident, loaded: Sequence[Resident], bounds: Bounds) -> list[Resident]:
    """Return the models that must go for ``wanted``: itself, if it failed in use; models with its workers; then idle
    models, the longest idle first, until it fits. If it cannot fit, all go: loading then reports by how much."""
    going = [each for each in loaded if each.name == wanted.name or each.workers & wanted.workers]
    stay = sorted((e for e in loaded if e not in going), key=lambda e: (-bool(e.num_using), -e.rested_since))
    while stay and not _fits([*stay, wanted], bounds):
        going.append(stay.pop())
    return going


def _fits(together: Sequence[Resident], bounds: Bounds) -> bool:
    is_few = bounds.most is None or len(together) <= bounds.most
    return is_few and sum(each.needs for each in together) <= bounds.room


def num_together(needs: Sequence[int], bounds: Bounds) -> int:
    """Return how many of the models fit into memory together, at most: that number of models shares its room for KV.

    >>> num_together([30, 10, 20], Bounds(room=45)), num_together([50], Bounds(room=45))
    (2, 1)
    """
    fitting, total = 0, 0
    for each in sorted(needs):
        total += each
        fitting += total <= bounds.room
    return max(1, min(fitting, bounds.most or fitting))
