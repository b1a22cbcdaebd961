"""The options of a comparison: those of ``splitinfer bench``, and more."""

from dataclasses import dataclass
from pathlib import Path

from splitinfer.bench.options import Options


@dataclass(frozen=True, slots=True)
class Wanted(Options):
    """A comparison.

    minutes: how long it may take.
    report: the page to share; ``None``: none is written.
    ssh: whether mlx-lm's own ways are started on the layout's other machines.
    """

    minutes: float = 15.0
    report: Path | None = None
    ssh: bool = False
