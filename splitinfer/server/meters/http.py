"""Counts of HTTP. Each route is counted by its pattern, and paths without a route as ``other``: clients choose paths
freely."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitinfer.core.metrics.histogram import TOKENS, Histogram

OTHER = "other"
"""The route of what reached none."""
_CHOICES = (1, 2, 5, 10, 20)


@dataclass(slots=True)
class HttpMeters:
    """Counts on the event loop. ``responses``: by route and status. ``turned_away``: requests refused because the queue
    was full. ``choices``: answers to a prompt. ``longest``: tokens of the longest answer to a prompt."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    turned_away: int = 0
    choices: Histogram = field(default_factory=lambda: Histogram(_CHOICES))
    longest: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def responded(self, route: str, status: int) -> None:
        """Count a request that was answered, or that its client left. ``route``: its pattern."""
        self.responses[route, status] += 1

    def answered(self, num_tokens: Sequence[int]) -> None:
        """Count a prompt's finished answers. ``num_tokens``: of each answer."""
        self.choices.add(len(num_tokens))
        self.longest.add(max(num_tokens))
