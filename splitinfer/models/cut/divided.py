"""Tensor parallelism: divides a model's layers over ranks with mlx-lm's own ``shard(group)`` of the model's class.

``shard`` keeps this rank's rows or columns of the layers' matrices, and makes the layers add up what all ranks computed
(``all_sum``). It asks the group only for its size and this rank's number. So a *pretended* rank on placeholders shows,
without a second process, whether a model can be divided, what a rank holds and how many sums a layer makes. mlx-lm
divides counts such as heads by ``//`` and does not check the remainder: a model with a remainder fails in its first
step, or computes something else.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from splitinfer.core.layout import RANKS
from splitinfer.errors import ModelError
from splitinfer.models.library.layers import type_name

_INSTEAD = "Cut it by layers instead, with a stage for each machine."
_replacing = threading.Lock()


class PretendedRank:
    """Stands for MLX's group and says that this process is the first rank."""

    def size(self) -> int:
        """Return the number of ranks."""
        return RANKS

    def rank(self) -> int:
        """Return this rank's number."""
        return 0


def divide(model: nn.Module, group: Any) -> None:
    """Reduce a model in place to this rank's part of it. Computes nothing.

    Args:
        model: the model as built, from any arrays.
        group: a group of ``mx.distributed``, or a ``PretendedRank``.

    Raises:
        ModelError: the model cannot be divided by this number of ranks; says why, and what to do instead.
    """
    name, num_ranks = type_name(model), group.size()
    if not callable(getattr(model, "shard", None)):
        raise ModelError(f"{name} cannot be divided over machines: mlx-lm has no shard() for it. {_INSTEAD}")
    before = _counts(model)
    try:
        model.shard(group)
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"{name} cannot be divided by {num_ranks} ranks ({said}). {_INSTEAD}") from error
    after = _counts(model)
    for (path, attribute), count in before.items():
        now = after.get((path, attribute), count)
        if now not in (count, count / num_ranks):
            what = f"{attribute} of {path.rpartition('.')[2]}"
            raise ModelError(f"{name} cannot be divided by {num_ranks} ranks: {what} is {count}. {_INSTEAD}")


def _counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return the integer attributes of a model's modules, such as counts of heads."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }


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
            return x

        def one_gather(x: mx.array, *, group: Any = None, **more: Any) -> mx.array:
            if not isinstance(group, PretendedRank):
                return all_gather(x, group=group, **more)
            return mx.concatenate([x] * RANKS)

        group.all_sum, group.all_gather = one_sum, one_gather
        try:
            yield sums
        finally:
            group.all_sum, group.all_gather = all_sum, all_gather
