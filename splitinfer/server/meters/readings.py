"""What was counted at one moment: by the engine, and of HTTP by the server. Pure.

A route is counted by its pattern, and what reaches none as ``other``: paths are the clients' own words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.metrics.distribution import Distribution, Histogram
from splitinfer.core.metrics.requests import CHOICES, TOKENS, RequestFigures
from splitinfer.engine.coordinator.health import PipelineHealth

OTHER = "other"
"""The route of what reached none."""


@dataclass(frozen=True, slots=True)
class HttpFigures:
    """A reading. ``responses``: by route and status; ``turned_away``: requests for which the queue had no room;
    ``running``: requests that ask for an answer, now."""

    responses: Mapping[tuple[str, int], int]
    turned_away: int
    choices: Histogram
    longest: Histogram
    running: int = 0
    is_draining: bool = False


@dataclass(slots=True)
class HttpMeters:
    """Counts on the event loop. ``choices``: answers to a prompt; ``longest``: tokens of the longest of these."""

    _responses: dict[tuple[str, int], int] = field(default_factory=dict)
    _turned_away: int = 0
    _choices: Distribution = field(default_factory=lambda: Distribution(CHOICES))
    _longest: Distribution = field(default_factory=lambda: Distribution(TOKENS))

    def responded(self, route: str, status: int) -> None:
        """A request was answered, or left by its client. ``route``: its pattern."""
        self._responses[route, status] = self._responses.get((route, status), 0) + 1

    def turned_away(self) -> None:
        self._turned_away += 1

    def answered(self, num_tokens: Sequence[int]) -> None:
        """A prompt's answers have ended. ``num_tokens``: of each."""
        self._choices.add(len(num_tokens))
        self._longest.add(max(num_tokens))

    def read(self, running: int = 0, *, is_draining: bool = False) -> HttpFigures:
        counted = self._choices.read(), self._longest.read()
        return HttpFigures(dict(self._responses), self._turned_away, *counted, running, is_draining)


@dataclass(frozen=True, slots=True)
class Readings:
    """All that is told, read at one moment. ``model``: its name for clients; ``context``: tokens; ``version``:
    splitinfer's; ``layout``: its name; ``stats``: as ``LLM.stats`` returns them."""

    model: str
    context: int
    version: str
    layout: str
    stats: Mapping[str, Any]
    requests: RequestFigures
    http: HttpFigures
    health: PipelineHealth
