"""The options of ``splitinfer bench --mode speculation``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The command line's options. ``layout``: ``None`` for a stand-in model on an emulated machine, with ``streams``
    alone. ``drafter``: ``replay``, or as in a layout; ``None``: the layout's. ``streams``: numbers of streams to draft
    for at once; none for one stream. ``come_and_go``: seconds in which requests come and go, beside those."""

    layout: str | None
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
    streams: tuple[int, ...] = ()
    come_and_go: float = 0.0
