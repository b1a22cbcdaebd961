"""Which machine gets which layers, by what is known after `up` has reached them all. Pure.

``Planner`` is the seam: it gets the model and the workers, and gives a layout. ``by_memory`` is the one that is here:
layers in the proportion of free memory, at least one each. It knows nothing of speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from splitinfer.core.layout import Layout, lay_out
from splitinfer.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that waits: the name of its stage, its address and public key, and bytes that are free there."""

    name: str
    address: str
    key: str
    free: int


Planner = Callable[[str, Sequence[Ready]], Layout]
"""A layout of a model (hub id, folder or built-in name) for this machine and workers."""


def by_memory(model: str, num_layers: int, own: tuple[str, int], workers: Sequence[Ready]) -> Layout:
    """Cut a model of ``num_layers`` layers by free memory. ``own``: this machine's name and its free bytes.

    Raises:
        LayoutError: there are more machines than layers.
    """
    if num_layers < 1 + len(workers):
        raise LayoutError(f"{model} has {num_layers} layers, too few for {1 + len(workers)} machines; name fewer")
    counts = shares(num_layers, [own[1], *(each.free for each in workers)])
    name = own[0] if all(each.name != own[0] for each in workers) else f"{own[0]} (coordinator)"
    parts = [
        (each.name, count, each.address, {"key": each.key}) for each, count in zip(workers, counts[1:], strict=True)
    ]
    return Layout(lay_out([(name, counts[0], None), *parts]), model, name="(of `up`)")


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` things in the proportion of ``weights``, at least one each; the rest goes where most is missing.

    >>> shares(66, [40, 26]), shares(4, [0, 100, 0]), shares(3, [0, 0])
    ([40, 26], [1, 2, 1], [2, 1])
    """
    heavy = [max(each, 0) for each in weights]
    whole = sum(heavy)
    exact = [total * each / whole if whole else total / len(heavy) for each in heavy]
    found = [max(1, int(each)) for each in exact]
    places = range(len(found))
    while sum(found) < total:
        found[max(places, key=lambda i: (exact[i] - found[i], -i))] += 1
    while sum(found) > total:
        found[max((i for i in places if found[i] > 1), key=lambda i: (found[i] - exact[i], -i))] -= 1
    return found


def as_text(layout: Layout) -> str:
    """A layout as a file that `coord --layout` reads."""
    stages = [_stage(each.name, each.num_layers, each.address, each.key) for each in layout.stages]
    content: dict[str, Any] = {"model": layout.model, "stages": stages}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _stage(name: str, layers: int, address: str | None, key: str | None) -> dict[str, Any]:
    optional = {"address": address, "key": key}
    return {"name": name, "layers": layers, **{key: value for key, value in optional.items() if value is not None}}
