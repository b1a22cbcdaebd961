"""Which layers of a model some tensors are, for people: by the numbers in their names, as nearly all models have them.

What a stage really reads is found out by building the model (``models.loader``); this is only for a table.
"""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def layers_in(names: Iterable[str], of: Iterable[str]) -> str:
    """The layers all of whose tensors are among ``names``, and whether anything beside layers is there. ``of``: all
    tensors of the model.

    >>> of = [f"model.layers.{i}.{t}" for i in range(6) for t in "ab"] + ["model.norm", "lm_head"]
    >>> layers_in([name for name in of if ".1." in name or ".2." in name or ".5." in name], of)
    '1-2, 5'
    >>> layers_in(["model.layers.0.a", "model.norm"], of)
    'and others'
    >>> layers_in(of, of)
    'all'
    """
    here, whole = set(names), set(of)
    if here >= whole:
        return "all"
    missing = {_layer_of(name) for name in whole - here}
    layers = sorted(layer for layer in {_layer_of(name) for name in here} - missing if layer is not None)
    ranges = ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in _runs(layers))
    others = "and others" if any(_layer_of(name) is None for name in here) else ""
    return " ".join(filter(None, (ranges, others))) or "none"


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Rising numbers as first and last of each run."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
