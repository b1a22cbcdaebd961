"""A job, and how jobs share the time that there is. Pure.

Jobs run one after the other, each for at most its share. What one leaves of its time goes to those behind it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """A process.

    name: in the document.
    module: its ``measure`` is called.
    options: of ``measure``, as JSON.
    environment: variables of the process and its children.
    """

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def allotted(left: float, weights: Sequence[float], most: float | None = None) -> float:
    """Seconds for the first of those that are left, by weight, when ``left`` seconds are.

    >>> allotted(60.0, [1.0, 2.0]), allotted(60.0, [1.0, 2.0], most=5.0), allotted(-1.0, [1.0])
    (20.0, 5.0, 0.0)
    """
    share = max(0.0, left) * (weights[0] / sum(weights))
    return share if most is None else min(share, most)


def tails(weights: Sequence[float]) -> Iterator[Sequence[float]]:
    """What is left of them before each.

    >>> list(tails([1.0, 2.0]))
    [[1.0, 2.0], [2.0]]
    """
    return (weights[at:] for at in range(len(weights)))
