"""Cuts: which machine holds which layers, in which order. The coordinator is first, the others in any order.

Two or three machines have few enough cuts to try them all: of 66 layers 65 and 2,080 for each order. Where there are
more than ``MOST``, those on a grid are tried first, and then those near the best of these, nearer and nearer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import comb

MOST = 20_000  # cuts that are screened one by one


@dataclass(frozen=True, slots=True)
class Cut:
    """``machines``: the stages' places among the profiles, the coordinator's 0 first; ``layers``: their numbers."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The numbers of layers, as in a layout's name: ``40-26``."""
        return "-".join(map(str, self.layers))

    def stages(self) -> Iterator[tuple[int, int, int]]:
        """Each stage's machine and its layers [start, end)."""
        start = 0
        for machine, count in zip(self.machines, self.layers, strict=True):
            yield machine, start, start + count
            start += count


def orders(num_machines: int, num_layers: int, *, uses_all: bool) -> list[tuple[int, ...]]:
    """The orders of machines: 0 first, and the others, all or some of them, in any order; none has more machines than
    there are layers.

    >>> orders(3, 66, uses_all=True), orders(2, 66, uses_all=False)
    ([(0, 1, 2), (0, 2, 1)], [(0,), (0, 1)])
    """
    most = min(num_machines, num_layers) - 1
    counts = [num_machines - 1] if uses_all else range(most + 1)
    return [(0, *rest) for count in counts if count <= most for rest in permutations(range(1, num_machines), count)]


def count_cuts(num_stages: int, num_layers: int) -> int:
    """The number of cuts of so many layers into so many stages."""
    return comb(num_layers - 1, num_stages - 1)


def stride_of(all_orders: Sequence[tuple[int, ...]], num_layers: int, most: int = MOST) -> int:
    """The least distance of a grid's lines with which there are no more than ``most`` cuts."""
    stride = 1
    while stride < num_layers and _num_on_grid(all_orders, num_layers, stride) > most:
        stride += 1
    return stride


def _num_on_grid(all_orders: Sequence[tuple[int, ...]], num_layers: int, stride: int) -> int:
    lines = len(range(stride, num_layers, stride))
    return sum(comb(lines, len(order) - 1) for order in all_orders)


def on_grid(all_orders: Iterable[tuple[int, ...]], num_layers: int, stride: int = 1) -> Iterator[Cut]:
    """The cuts at every ``stride``-th layer."""
    for order in all_orders:
        for ends in combinations(range(stride, num_layers, stride), len(order) - 1):
            yield _cut(order, ends, num_layers)


def near(cuts: Iterable[Cut], distance: int) -> Iterator[Cut]:
    """``cuts``, and those with any of their ends moved by ``distance`` layers; each once."""
    seen: set[Cut] = set()
    for cut in cuts:
        ends = [end for _, _, end in cut.stages()]
        num_layers = ends.pop()
        for moved in product(*((end - distance, end, end + distance) for end in ends)):
            if all(a < b for a, b in zip((0, *moved), (*moved, num_layers), strict=True)):
                found = _cut(cut.machines, moved, num_layers)
                if found not in seen:
                    seen.add(found)
                    yield found


def _cut(order: tuple[int, ...], ends: tuple[int, ...], num_layers: int) -> Cut:
    return Cut(order, tuple(b - a for a, b in zip((0, *ends), (*ends, num_layers), strict=True)))
