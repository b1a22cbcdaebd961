"""What the token of one row of logits depends on, beside the logits."""

from dataclasses import dataclass

import mlx.core as mx

from splitinfer.core.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """What one row's token depends on: ``position`` is the one it fills, ``recent`` the tokens before it.

    ``answer``: the tokens of the answer so far; empty where no penalty depends on them. ``mask``: which tokens may be
    chosen, bool [vocabulary]; ``None``: any.
    """

    params: SamplingParams
    seed: int
    position: int
    recent: tuple[int, ...]
    answer: tuple[int, ...] = ()
    mask: mx.array | None = None
