"""What the token of one row of logits depends on, beside the logits."""

from dataclasses import dataclass

from splitinfer.core.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """What one row's token depends on: ``position`` is the one it fills, ``recent`` the tokens before it.

    ``answer``: the tokens of the answer so far; empty where no penalty depends on them.
    """

    params: SamplingParams
    seed: int
    position: int
    recent: tuple[int, ...]
    answer: tuple[int, ...] = ()
