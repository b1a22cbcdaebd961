"""Tensor parallel: a model whose layers are divided over ranks, by mlx-lm's own ``shard(group)`` of its class.

``shard`` keeps this rank's rows or columns of the layers' matrices, and has the layers sum up what all ranks computed
(``all_sum``); it asks the group for its size and this rank's number only, so a *pretended* rank shows on placeholders
whether a model can be divided, what a rank of it holds and how many sums a layer makes, without a second process.
What mlx-lm does not check is whether heads divide: it divides counts by ``//``, and a model with a remainder fails
in its first step, or computes something else.
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
    """The first of the ranks, in place of a group of MLX's."""

    def size(self) -> int:
        """As a group's."""
        return RANKS

    def rank(self) -> int:
        """As a group's."""
        return 0


def divide(model: nn.Module, group: Any) -> None:
    """Divide a model in place: from now on it is this rank's part of it. Nothing is computed.

    Args:
        model: as built, of any arrays.
        group: of ``mx.distributed``, or a ``PretendedRank``.

    Raises:
        ModelError: it cannot be divided by so many ranks; the reason in one sentence, and what to do instead.
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
    """Return the whole numbers among the attributes of a model's modules, such as counts of heads."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }


@contextmanager
def alone() -> Iterator[list[int]]:
    """Let models that a pretended rank divided build their graphs, though no other rank is there to sum with. The list
    gets the bytes of each sum, in order."""
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
