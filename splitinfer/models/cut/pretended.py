"""Stands for the ranks of a stage across two machines in one process: divided models build their graphs, and add up."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from splitinfer.core.layout import RANKS

_replacing = threading.RLock()
_Result = TypeVar("_Result")


class _Sum(BaseException):
    """Carries what a rank adds to a sum that is not known yet."""


class PretendedRank:
    """Stands for MLX's group and says that this process is rank ``rank``. ``add``: returns the sum for what this rank
    has of it."""

    def __init__(self, rank: int = 0, add: Callable[[mx.array], mx.array] = lambda x: x) -> None:
        self._rank, self.add = rank, add

    def size(self) -> int:
        """Return the number of ranks."""
        return RANKS

    def rank(self) -> int:
        """Return this rank's number."""
        return self._rank


@contextmanager
def alone() -> Iterator[list[int]]:
    """Let models divided by a ``PretendedRank`` build their graphs without another rank, during the ``with`` block.
    Yield a list that receives the bytes of each sum, in order."""
    sums, group = list[int](), mx.distributed
    with _replacing:
        all_sum, all_gather = group.all_sum, group.all_gather

        def one_sum(x: mx.array, *, group: Any = None, **more: Any) -> mx.array:
            if not isinstance(group, PretendedRank):
                return all_sum(x, group=group, **more)
            sums.append(x.nbytes)
            return group.add(x)

        def one_gather(x: mx.array, *, group: Any = None, **more: Any) -> mx.array:
            if not isinstance(group, PretendedRank):
                return all_gather(x, group=group, **more)
            return mx.concatenate([x] * RANKS)

        group.all_sum, group.all_gather = one_sum, one_gather
        try:
            yield sums
        finally:
            group.all_sum, group.all_gather = all_sum, all_gather


def together(run: Callable[[int], _Result], groups: Sequence[PretendedRank]) -> list[_Result]:
    """Return what each rank computes, where sums are those of all of them. Call it within ``alone``.

    ``run``: computes a rank's part, the same each time: it ends at the first sum that is not known, and begins again
    once all ranks were there.
    """
    totals = list[mx.array]()
    while True:
        results, parts = list[_Result](), list[mx.array]()
        for rank, group in enumerate(groups):
            known = iter(totals)

            def add(x: mx.array, known: Iterator[mx.array] = known) -> mx.array:
                for total in known:
                    return total
                raise _Sum(x)

            group.add = add
            try:
                results.append(run(rank))
            except _Sum as reached:
                parts.append(reached.args[0])
        if not parts:
            return results
        if results:
            raise ValueError("one rank makes more sums than the other")
        totals.append(sum(parts[1:], start=parts[0]))
