"""How often drafts are right, counted as verdicts come.

A draft is *tried* when all before it in its block were right, and its own position was sampled; so each block tries one
more than it accepts, unless all are right. Acceptance is counted for each request, because texts differ; for all
together, as a part of the prior of a new request; and by place in the block. Old tries fade, because texts change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.98  # a try's weight is multiplied by this with each try after it
_PRIOR, _PRIOR_WEIGHT = 0.7, 3.0  # acceptance of a new drafter, and the tries it counts as
_REQUEST_WEIGHT = 3.0  # tries that the prior of a new request counts as
_FEW = 8  # tries, which say nothing yet
_NEW = 0.35  # the part of a new request's prior that does not depend on what others had: texts differ
PLACES = 16  # in a block


@dataclass(slots=True)
class Acceptance:
    """A fading share of drafts that were right. ``like``, ``usual``: its prior is between the two."""

    like: "Acceptance | None" = None
    usual: float = _PRIOR
    tried: float = 0.0
    accepted: float = 0.0

    def add(self, tried: int, accepted: int) -> None:
        """Count a block's verdict: of the tried drafts only the last can be wrong."""
        for i in range(tried):
            self.tried = _MEMORY * self.tried + 1
            self.accepted = _MEMORY * self.accepted + (i < accepted)

    @property
    def share(self) -> float:
        """The probability that the next draft is right."""
        return (self.accepted + self._weight * self._prior) / (self.tried + self._weight)

    @property
    def at_most(self) -> float:
        """What the probability may well be, as few tries tell little: a standard deviation above ``share``."""
        share = self.share
        return min(1.0, share + math.sqrt(share * (1 - share) / (self.tried + self._weight)))

    @property
    def _weight(self) -> float:
        return _PRIOR_WEIGHT if self.like is None else _REQUEST_WEIGHT

    @property
    def _prior(self) -> float:
        return self.usual if self.like is None else (1 - _NEW) * self.like.share + _NEW * self.usual

    @property
    def seen_at_most(self) -> float:
        """What the probability may be by what was seen alone: two standard errors above that, 0 where no draft was
        ever right. While little was seen, by the prior, too: of many requests one is always unlucky at first."""
        share, weight = self.share, self.tried + self._weight
        if self.tried >= _FEW:
            share, weight = self.accepted / self.tried, self.tried
        return min(1.0, share + 2 * math.sqrt(share * (1 - share) / weight))


@dataclass(slots=True)
class Sum:
    """A number of things and the seconds they took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Add ``count`` things that took ``seconds``."""
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class Counts:
    """Counts of drafts since the start. ``tried_at``, ``accepted_at``: by place in the block, from 0."""

    drafted: int = 0
    sent: int = 0  # in plans
    tried_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    accepted_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    blocks: int = 0
    void: int = 0  # blocks behind a wrong draft, discarded as a whole
    unsent: int = 0  # blocks discarded before they were sent to the other stages
    spared: dict[int, int] = field(default_factory=dict)  # by stage: void rows that it did not compute
    spared_steps: dict[int, int] = field(default_factory=dict)  # by stage: steps of which it computed nothing
    runs: dict[int, int] = field(default_factory=dict)  # by number of right drafts before a wrong one: how often
    steps: dict[tuple[int, int], Sum] = field(default_factory=dict)  # steps of one sequence, by stage and rows
    drafting: Sum = field(default_factory=Sum)
    links: Sum = field(default_factory=Sum)  # round trips, less the time of computing

    def went(self, num_drafts: int) -> None:
        """Count a block in a plan."""
        self.sent += num_drafts
        self.blocks += 1

    def add(self, place: int, *, accepted: bool) -> None:
        """Count one tried draft."""
        place = min(place, PLACES - 1)
        self.tried_at[place] += 1
        self.accepted_at[place] += accepted

    def computed(self, rows: Sequence[int]) -> None:
        """Count what the stages behind the first did not compute of a step. ``rows``: computed, by stage."""
        for stage, count in enumerate(rows[1:], 1):
            if count < rows[0]:
                self.spared[stage] = self.spared.get(stage, 0) + rows[0] - count
                self.spared_steps[stage] = self.spared_steps.get(stage, 0) + (count == 0)

    def as_dict(self) -> dict[str, object]:
        """The counts as plain numbers."""
        tried, accepted = sum(self.tried_at), sum(self.accepted_at)
        return {
            "drafted": self.drafted,
            "sent": self.sent,
            "accepted": accepted,
            "acceptance": accepted / tried if tried else None,
            "tried_at": list(self.tried_at),
            "accepted_at": list(self.accepted_at),
            "blocks": self.blocks,
            "void_blocks": self.void,
            "unsent_blocks": self.unsent,
            "spared_rows": dict(sorted(self.spared.items())),
            "spared_steps": dict(sorted(self.spared_steps.items())),
            "runs": dict(sorted(self.runs.items())),
            "steps": [[stage, rows, each.count, each.seconds] for (stage, rows), each in sorted(self.steps.items())],
            "drafting": [self.drafting.count, self.drafting.seconds],
            "links": [self.links.count, self.links.seconds],
        }
