"""Runs a stage across two machines: each, a *rank*, holds half of every layer (tensor parallelism).

``models.cut.divided`` cuts the weights and adds two sums of both halves to each layer's graph. All else is as on one
machine: both ranks get the same plans, so they evaluate the same graphs in the same order, and a sum of two has the
same bits on both. Both compute norm, head and sampler in full.

A rank that evaluates a sum which the other does not evaluate waits for ever. So everything that decides about a graph
must be the same on both. Facts that only one rank knows (a file on its disk, its memory of earlier requests) are agreed
on first (``Pair.all_of``).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.core.layout import RANKS
from splitinfer.errors import DeviceFailed
from splitinfer.models.cut.divided import divide
from splitinfer.models.cut.pretended import PretendedRank
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.load.building import build_with_pictures, placeholders_of

_TIMED = 16
_KNOWN = 4096  # numbers in the sum that each load checks: about the hidden states of a few tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """The two ranks, as rank ``rank`` sees them. ``sums``: MLX's group."""

    rank: int
    sums: Any

    def all_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on both ranks. Both must call it between the same two sums."""
        if not flags:
            return []
        counts = mx.distributed.all_sum(mx.array([float(flag) for flag in flags]), group=self.sums)
        return [count == RANKS for count in counts.tolist()]  # type: ignore[union-attr]

    def check_alike(self, model: nn.Module) -> None:
        """Check that both ranks have divided a model in the same way.

        Raises:
            DeviceFailed: they have not.
        """
        shapes = [(name, array.shape) for name, array in tree_flatten(model.parameters())]
        own = float(crc32(repr(shapes).encode()) % 2**20)  # a sum in float32 is exact
        total = mx.distributed.all_sum(mx.array([own]), group=self.sums)
        if total.item() != RANKS * own:
            raise DeviceFailed("the device failed (the two ranks divide the model differently: are both alike?)")

    def seconds(self, count: int) -> float:
        """Return the seconds of a sum of ``count`` float32 numbers, with a computation of the device before it."""
        for _ in range(2):  # the first round sets up what the second finds
            began, numbers = time.perf_counter(), mx.zeros(count)
            for _ in range(_TIMED):
                numbers = mx.distributed.all_sum(numbers / RANKS, group=self.sums)
            mx.eval(numbers)
        return (time.perf_counter() - began) / _TIMED

    def check(self) -> None:
        """Add up numbers whose sum is known.

        Raises:
            DeviceFailed: the result differs.
        """
        numbers = mx.arange(_KNOWN, dtype=mx.float32)
        total = mx.distributed.all_sum(numbers * (self.rank + 1), group=self.sums)
        if not mx.array_equal(total, numbers * sum(range(1, RANKS + 1))).item():
            raise DeviceFailed("the device failed (the two ranks add up to other numbers than they should)")


def check_halves(checkpoint: Checkpoint, *, sees: bool = False) -> None:
    """Check that a model can be halved. Reads no weight. ``sees``: its classes are those of models that see.

    Raises:
        ModelError: it cannot; says why, and what to do instead.
    """
    divide(build_with_pictures(checkpoint, placeholders_of(checkpoint), None, sees=sees)[0], PretendedRank())
