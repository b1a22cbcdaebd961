"""What of a request becomes its span (``server.otlp``), and what its client is told of its tokens. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; those of a prompt count once, whatever the number of choices. ``reasoning``: of those that
    were generated, the ones of reasoning. ``tried``, ``right``: drafts that came to a verdict, and those of them that
    became tokens."""

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    tried: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came. ``route``: its pattern; ``began``: seconds on the monotonic clock."""

    route: str
    request_id: str
    began: float
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """One choice: seconds on the monotonic clock, ``None`` where it did not come to that. ``reason``: why it ended;
    ``None``: it was not read to its end."""

    submitted: float
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    reason: str | None = None
