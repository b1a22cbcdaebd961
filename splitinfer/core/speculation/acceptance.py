"""How often drafts are right.

A draft is *tried* if all drafts before it in its block were right and its own position was sampled. So each block tries
one more than it accepts, unless all are right. Acceptance is counted for each request, because texts differ; for all
together, as a part of a new request's prior; and by place in the block. Old tries fade, because texts change.
"""

import math
from dataclasses import dataclass, field

_MEMORY = 0.995  # a try's weight is multiplied by this with each try after it
_PRIOR, _PRIOR_WEIGHT = 0.7, 3.0  # acceptance of a new drafter, and the tries it counts as
_REQUEST_WEIGHT = 10.0  # tries that the prior of a new request counts as
_SEEN_WEIGHT = 2.0  # the same for ``at_most``
_LATEST, _CHANGED = 10, 0.35  # latest tries, and by how much their share must differ to show that a text has changed
PLACES = 16  # in a block


@dataclass(slots=True)
class Acceptance:
    """The share of drafts that were right; old ones fade. ``like``: the share of all similar drafts, which also counts
    this one's and is its prior; ``usual``: the prior without ``like``."""

    like: "Acceptance | None" = None
    usual: float = _PRIOR
    tried: float = 0.0
    accepted: float = 0.0
    latest: float | None = None

    def add(self, tried: int, accepted: int) -> None:
        """Count a block's verdict. Of the tried drafts, only the last can be wrong."""
        for i in range(tried):
            is_right = i < accepted
            self.latest = self.share if self.latest is None else self.latest
            self.latest += (is_right - self.latest) / _LATEST
            self.tried = _MEMORY * self.tried + 1
            self.accepted = _MEMORY * self.accepted + is_right
            if self.tried > _LATEST and abs(self.latest - self.accepted / self.tried) > _CHANGED:
                self.tried, self.accepted = float(_LATEST), _LATEST * self.latest
        if self.like is not None:
            self.like.add(tried, accepted)

    @property
    def share(self) -> float:
        """The probability that the next draft is right."""
        return (self.accepted + self._weight * self._prior) / (self.tried + self._weight)

    @property
    def at_most(self) -> float:
        """A plausible upper bound of the probability: a standard deviation above the share seen, because few tries tell
        little."""
        share = (self.accepted + _SEEN_WEIGHT * self._prior) / (self.tried + _SEEN_WEIGHT)
        return min(1.0, share + math.sqrt(share * (1 - share) / (self.tried + _SEEN_WEIGHT)))

    @property
    def _weight(self) -> float:
        return _PRIOR_WEIGHT if self.like is None else _REQUEST_WEIGHT

    @property
    def _prior(self) -> float:
        return self.usual if self.like is None else self.like.share


_ENOUGH = 50  # first drafts of blocks


@dataclass(slots=True)
class Counts:
    """Counts of drafts since the start. ``tried_at``, ``accepted_at``: by place in the block, from 0."""

    drafted: int = 0
    sent: int = 0  # in plans
    tried_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    accepted_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    blocks: int = 0
    rejected: int = 0  # blocks discarded as a whole after a wrong draft
    was_told: bool = False  # whether ``next_to_none_right`` was true

    def next_to_none_right(self) -> bool:
        """Return true once, when enough first drafts of blocks were tried and at most 1 in 25 of them was right."""
        is_new = not self.was_told and self.tried_at[0] >= _ENOUGH and 25 * self.accepted_at[0] <= self.tried_at[0]
        self.was_told |= is_new
        return is_new

    def add(self, place: int, *, accepted: bool) -> None:
        """Count one tried draft."""
        place = min(place, PLACES - 1)
        self.tried_at[place] += 1
        self.accepted_at[place] += accepted

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain numbers."""
        tried, accepted = sum(self.tried_at), sum(self.accepted_at)
        return {
            "drafted": self.drafted,
            "sent": self.sent,
            "accepted": accepted,
            "acceptance": accepted / tried if tried else None,
            "tried_at": list(self.tried_at),
            "accepted_at": list(self.accepted_at),
            "blocks": self.blocks,
            "void_blocks": self.rejected,
        }
