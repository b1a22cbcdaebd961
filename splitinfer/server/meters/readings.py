"""What was counted at one moment: by the engine, and of HTTP by the server. Pure.

A route is counted by its pattern, and what reaches none as ``other``: paths are the clients' own words.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.metrics.distribution import Distribution
from splitinfer.core.metrics.requests import CHOICES, TOKENS, RequestFigures
from splitinfer.engine.coordinator.health import PipelineHealth

OTHER = "other"
"""The route of what reached none."""


@dataclass(slots=True)
class HttpMeters:
    """Counts on the event loop. ``responses``: by route and status; ``turned_away``: requests for which the queue had
    no room; ``choices``: answers to a prompt; ``longest``: tokens of the longest of these."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    turned_away: int = 0
    choices: Distribution = field(default_factory=lambda: Distribution(CHOICES))
    longest: Distribution = field(default_factory=lambda: Distribution(TOKENS))

    def responded(self, route: str, status: int) -> None:
        """A request was answered, or left by its client. ``route``: its pattern."""
        self.responses[route, status] += 1

    def answered(self, num_tokens: Sequence[int]) -> None:
        """A prompt's answers have ended. ``num_tokens``: of each."""
        self.choices.add(len(num_tokens))
        self.longest.add(max(num_tokens))


@dataclass(frozen=True, slots=True)
class Readings:
    """All that is told, read at one moment. ``model``: its name for clients; ``context``: tokens; ``version``:
    splitinfer's; ``layout``: its name; ``stats``: as ``LLM.stats`` returns them; ``running``: requests that ask for an
    answer, now."""

    model: str
    context: int
    version: str
    layout: str
    stats: Mapping[str, Any]
    requests: RequestFigures
    http: HttpMeters
    health: PipelineHealth
    running: int = 0
    is_draining: bool = False
