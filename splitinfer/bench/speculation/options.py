"""The options of ``splitinfer bench --mode speculation``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The command line's options. ``drafter``: ``replay``, or as in a layout; ``None``: the layout's."""

    layout: str
    model: str | None
    as_json: bool
    trials: int
    decode_tokens: int
    seed: int
    link_preset: str | None
    baseline: bool
    connect_timeout: float
    drafter: str | None = None
    acceptances: tuple[float, ...] = (0.0, 0.6, 0.8, 0.9)
    draft_share: float = 0.05
    temperatures: tuple[float, ...] = (0.0, 0.8)
    text: Path | None = None
    plot: Path | None = None
