"""What the token of one row of logits depends on, beside the logits."""

from dataclasses import dataclass

import mlx.core as mx

from splitinfer.core.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class Mask:
    """``allowed``: bool [vocabulary], the tokens that may be chosen; ``only``: the one that may, where it is alone."""

    allowed: mx.array
    only: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What one row's token depends on: ``position`` is the one it fills, ``recent`` the tokens before it.

    ``answer``: the tokens of the answer so far; empty where no penalty depends on them. ``mask``: ``None``: any token
    may be chosen.
    """

    params: SamplingParams
    seed: int
    position: int
    recent: tuple[int, ...]
    answer: tuple[int, ...] = ()
    mask: Mask | None = None

    @property
    def only(self) -> int | None:
        """Its token, where that is known without logits: one alone may come, and nobody asks how likely it is."""
        return None if self.mask is None or self.params.logprobs is not None else self.mask.only
