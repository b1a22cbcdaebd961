"""Cuts: the layers of each machine, in order. The coordinator is first, the others come in any order.

Two or three machines have few enough cuts to try them all: 65 and 2,080 for each order of 66 layers. If there are more
than ``MOST`` cuts, the cuts on a grid are tried first, and then the cuts near the best of these, nearer and nearer.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import comb

MOST = 20_000  # cuts that are screened one by one


@dataclass(frozen=True, slots=True)
class Cut:
    """``machines``: the stages' places among the profiles; the first is the coordinator's, 0, or its pair's.
    ``layers``: the stages' numbers of layers."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The numbers of layers, as in a layout's name: ``40-26``."""
        return "-".join(map(str, self.layers))

    def stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield each stage's machine and its layers [start, end)."""
        start = 0
        for machine, count in zip(self.machines, self.layers, strict=True):
            yield machine, start, start + count
            start += count


def orders(
    num_machines: int, num_layers: int, *, uses_all: bool, pairs: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, ...]]:
    """Return the orders of machines: 0 first, then all or some of the others in any order, at most as many machines as
    layers. ``pairs``: machines that may be one stage; the pairs' places follow the machines'.

    >>> orders(3, 66, uses_all=True), orders(2, 66, uses_all=False, pairs=[(0, 1)])
    ([(0, 1, 2), (0, 2, 1)], [(0,), (0, 1), (2,)])
    """
    most = min(num_machines, num_layers) - 1
    counts = [num_machines - 1] if uses_all else range(most + 1)
    found = [(0, *rest) for count in counts if count <= most for rest in permutations(range(1, num_machines), count)]
    return found + [
        (*order[:at], place, *order[at + 2 :])
        for order in found
        for at in range(len(order) - 1)
        for place, pair in enumerate(pairs, num_machines)
        if order[at : at + 2] == pair
    ]


def stride_of(all_orders: Sequence[tuple[int, ...]], num_layers: int, most: int = MOST) -> int:
    """Return the smallest distance between a grid's lines that gives at most ``most`` cuts."""

    def num_cuts(stride: int) -> int:
        lines = len(range(stride, num_layers, stride))
        return sum(comb(lines, len(order) - 1) for order in all_orders)

    return next(stride for stride in itertools.count(1) if num_cuts(stride) <= most or stride >= num_layers)


def on_grid(all_orders: Iterable[tuple[int, ...]], num_layers: int, stride: int = 1) -> Iterator[Cut]:
    """Yield the cuts at every ``stride``-th layer."""
    for order in all_orders:
        for ends in combinations(range(stride, num_layers, stride), len(order) - 1):
            yield _cut(order, ends, num_layers)


def near(cuts: Iterable[Cut], distance: int) -> list[Cut]:
    """Return ``cuts`` and the cuts with any of their ends moved by ``distance`` layers, each once."""
    found = dict.fromkeys(
        _cut(cut.machines, moved, sum(cut.layers))
        for cut in cuts
        for moved in product(*((end - distance, end, end + distance) for _, _, end in list(cut.stages())[:-1]))
    )
    return [cut for cut in found if min(cut.layers) > 0]


def _cut(order: tuple[int, ...], ends: tuple[int, ...], num_layers: int) -> Cut:
    return Cut(order, tuple(b - a for a, b in zip((0, *ends), (*ends, num_layers), strict=True)))
