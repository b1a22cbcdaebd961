"""What a block of KV has of one cache, as its file describes it; its bytes go beside it."""

from dataclasses import dataclass

from splitinfer.core.plan import TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A block's part of one cache, which ``slot`` names: with ``by_token`` the arrays of positions [start, end), else
    the state at ``end``."""

    slot: tuple[int, ...]
    by_token: bool
    start: int
    end: int
    arrays: tuple[TensorSpec, ...]
