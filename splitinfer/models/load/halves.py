"""A stage across two machines: each of them, a *rank*, holds a half of every layer (tensor parallel).

mlx-lm's own ``shard`` (``models.cut.divided``) cuts the weights of a model's class and puts sums of both halves into
its graph: two a layer. All else is as on one machine: both ranks are given the same plans, so they evaluate the same
graphs in the same order, and a sum of two has the same bits on both. What is behind the layers, the norm, the head and
the sampler, both compute alike.

A rank that evaluates a sum which the other does not waits for ever. So whatever decides about a graph must be the same
on both: what only one of them can know (a file on its disk, what it remembers) is agreed on first (``Pair.all_of``).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from splitinfer.core.layout import RANKS
from splitinfer.errors import DeviceFailed
from splitinfer.models.cut.divided import PretendedRank, divide
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.load.building import build_model, placeholders_of

_TIMED = 16
_KNOWN = 4096  # numbers of the sum at each load: as many as of a few tokens' hidden states


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ranks, as one of them sees them. ``sums``: MLX's group."""

    rank: int
    sums: Any

    def all_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of these are true on both ranks. Both call it at the same place between their sums."""
        if not flags:
            return []
        counts = mx.distributed.all_sum(mx.array([float(flag) for flag in flags]), group=self.sums)
        return [count == RANKS for count in counts.tolist()]  # type: ignore[union-attr]

    def seconds(self, count: int) -> float:
        """Return the seconds of a sum of so many numbers of four bytes, as behind something that the device
        computes."""
        for _ in range(2):  # the first makes what all others find
            began, numbers = time.perf_counter(), mx.zeros(count)
            for _ in range(_TIMED):
                numbers = mx.distributed.all_sum(numbers / RANKS, group=self.sums)
            mx.eval(numbers)
        return (time.perf_counter() - began) / _TIMED

    def check(self) -> None:
        """Add up numbers whose sum is known.

        Raises:
            DeviceFailed: another sum came.
        """
        numbers = mx.arange(_KNOWN, dtype=mx.float32)
        total = mx.distributed.all_sum(numbers * (self.rank + 1), group=self.sums)
        if not mx.array_equal(total, numbers * sum(range(1, RANKS + 1))).item():
            raise DeviceFailed("the device failed (the two ranks add up to other numbers than they should)")


def check_halves(checkpoint: Checkpoint) -> None:
    """Check that a model can be halved. Reads no weight.

    Raises:
        ModelError: it cannot; why not, and what to do instead.
    """
    divide(build_model(checkpoint, placeholders_of(checkpoint), None), PretendedRank())
