"""What is counted of HTTP. A route is counted by its pattern, and what reaches none as ``other``: paths are clients'
own words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitinfer.core.metrics.histogram import TOKENS, Histogram

OTHER = "other"
"""The route of what reached none."""
_CHOICES = (1, 2, 5, 10, 20)


@dataclass(slots=True)
class HttpMeters:
    """Counts on the event loop. ``responses``: by route and status; ``turned_away``: requests for which the queue had
    no room; ``choices``: answers to a prompt; ``longest``: tokens of the longest of these."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    turned_away: int = 0
    choices: Histogram = field(default_factory=lambda: Histogram(_CHOICES))
    longest: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def responded(self, route: str, status: int) -> None:
        """A request was answered, or left by its client. ``route``: its pattern."""
        self.responses[route, status] += 1

    def answered(self, num_tokens: Sequence[int]) -> None:
        """A prompt's answers have ended. ``num_tokens``: of each."""
        self.choices.add(len(num_tokens))
        self.longest.add(max(num_tokens))
