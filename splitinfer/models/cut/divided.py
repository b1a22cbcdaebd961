"""Tensor parallelism: divides a model's layers over ranks, with ``shard(group)`` of the model's class in mlx-lm or
mlx-vlm, or by inspection (``inspection``) where it has none, or one that leaves too much on each rank.

``shard`` keeps this rank's rows or columns of the layers' matrices, and makes the layers add up what all ranks computed
(``all_sum``). It asks the group only for its size and this rank's number. So a *pretended* rank on placeholders shows,
without a second process, whether a model can be divided, what a rank holds and how many sums a layer makes. The
libraries divide counts such as heads by ``//`` and do not check the remainder: a model with a remainder fails in its
first step, or computes something else.
"""

from typing import Any

import mlx.nn as nn

from splitinfer.errors import CannotCut, ModelError
from splitinfer.models.cut.inspection import bytes_of, find_units, halve, passed_on
from splitinfer.models.cut.pretended import PretendedRank, alone
from splitinfer.models.library.layers import copied, find_layers, type_name

_INSTEAD = "Cut it by layers instead, with a stage for each machine."
_MOST = 0.8  # of the bytes of its layers that a rank may hold


def divide(model: nn.Module, group: Any) -> None:
    """Reduce a model in place to this rank's part of it. Computes nothing.

    Args:
        model: the model as built, from any arrays.
        group: a group of ``mx.distributed``, or a ``PretendedRank``.

    Raises:
        ModelError: the model cannot be divided by this number of ranks; says why, and what to do instead.
    """
    name, num_ranks = type_name(model), group.size()
    if not callable(getattr(model, "shard", None)) or _shards_little(model, group.rank()):
        _divide_by_inspection(model, name, group)
        return
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


def _shards_little(model: nn.Module, rank: int) -> bool:
    """Return whether ``shard`` leaves a rank more of the layers than makes sense."""
    try:
        tried = copied(model)
        tried.shard(PretendedRank(rank))
    except Exception:  # noqa: BLE001 - it cannot be copied, or ``divide`` says why
        return False
    whole, half = (sum(bytes_of(slot.layer) for slot in find_layers(one)) for one in (model, tried))
    return half > _MOST * whole


def _divide_by_inspection(model: nn.Module, name: str, group: Any) -> None:
    layers = [slot.layer for slot in find_layers(model)]
    whole = sum(map(bytes_of, layers))
    try:
        units, before = find_units(model), passed_on(model)
        for i, own in enumerate(units):
            if not any(layers[i] is earlier for earlier in layers[:i]):  # some models run through a layer again
                halve(layers[i], own, group)
        with alone():
            after = passed_on(model) if any(before) else before
    except CannotCut as error:
        raise ModelError(f"{name} cannot be divided over machines: {error}. {_INSTEAD}") from error
    half = sum(map(bytes_of, layers))
    if half > _MOST * whole:
        raise ModelError(
            f"{name} cannot be divided over machines: it has no shard(), and by inspection a rank would still hold "
            f"{half / whole:.0%} of its layers. {_INSTEAD}"
        )
    for own, wanted, found in zip(units, before, after, strict=True):
        is_part = any(unit.given for unit in own.values())
        if any((a != b) != is_part for a, b in zip(wanted, found, strict=True)):
            raise ModelError(
                f"{name} cannot be divided over machines: some layers attend to other layers' keys and values, and only"
                f" one of both can be halved. {_INSTEAD}"
            )


def _counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return the integer attributes of a model's modules, such as counts of heads."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }
