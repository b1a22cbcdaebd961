"""Computes the size of a picture for a family of models: whole patches, within bounds, in nearly the picture's shape.

The rounding follows each family's own processor, because a picture of another size is another picture.
"""

import math
from typing import NamedTuple


class Fit(NamedTuple):
    """How a size is chosen. ``multiple``: both sides are multiples of it, in pixels. ``least``, ``most``: bounds on the
    area in pixels, or for ``longest`` on the longest side."""

    way: str
    multiple: int
    least: int
    most: int


MOST_STRETCHED = 200  # times as long as wide

_Size = tuple[int, int]


def fitted(fit: Fit, width: int, height: int) -> _Size:
    """Return the width and height to which a picture is resized.

    >>> fitted(Fit("area", 28, 3136, 10**6), 640, 480), fitted(Fit("longest", 28, 0, 560), 640, 480)
    ((644, 476), (560, 420))
    >>> fitted(Fit("budget", 48, 0, 645120), 640, 480)
    (912, 672)

    Raises:
        ValueError: no size suits a picture of that shape.
    """
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise ValueError(f"it is {width} x {height} pixels, more than {MOST_STRETCHED} times as long as wide")
    return {"area": _by_area, "longest": _by_longest, "budget": _by_budget}[fit.way](fit, width, height)


def _by_area(fit: Fit, width: int, height: int) -> _Size:
    """Return qwen's size: the nearest multiples, scaled into the bounds of the area."""
    sides, step = (width, height), fit.multiple
    near = [round(side / step) * step for side in sides]
    if near[0] * near[1] > fit.most:
        scale = math.sqrt(width * height / fit.most)
        near = [max(step, math.floor(side / scale / step) * step) for side in sides]
    elif near[0] * near[1] < fit.least:
        scale = math.sqrt(fit.least / (width * height))
        near = [math.ceil(side * scale / step) * step for side in sides]
    return near[0], near[1]


def _by_longest(fit: Fit, width: int, height: int) -> _Size:
    """Return pixtral's size: no side exceeds the bound; then each is rounded up to whole patches."""
    ratio = max(width, height) / fit.most
    if ratio > 1:
        width, height = max(1, math.floor(width / ratio)), max(1, math.floor(height / ratio))
    return tuple(((side - 1) // fit.multiple + 1) * fit.multiple for side in (width, height))  # type: ignore[return-value]


def _by_budget(fit: Fit, width: int, height: int) -> _Size:
    """Return gemma 4's size: as large as the bound of the area allows, rounded down to whole patches."""
    step, scale = fit.multiple, math.sqrt(fit.most / (width * height))
    across, down = (math.floor(scale * side / step) * step for side in (width, height))
    longest = fit.most // step
    if not down:
        return min(width // height * step, longest), step
    if not across:
        return step, min(height // width * step, longest)
    return across, down
