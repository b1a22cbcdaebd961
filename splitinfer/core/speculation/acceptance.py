"""How often drafts are right, counted as verdicts come.

A draft is *tried* when all before it in its block were right, and its own place was sampled; so each block tries one
more than it accepts, unless all are right. What counts is kept in three ways: for each request, because texts differ;
for all together, which is where a new request starts; and by the place in the block and by the drafter's own
confidence, to be looked at. Old tries fade, because texts change.
"""

from dataclasses import dataclass, field

_MEMORY = 0.98  # what is left of a try's weight when the next comes
_PRIOR, _PRIOR_WEIGHT = 0.7, 3.0  # a new drafter is taken for a usual one until it has been tried some times
_REQUEST_WEIGHT = 3.0  # tries by which a new request is taken to be like those before it
PLACES = 16  # in a block
BINS = 10  # of confidence


@dataclass(slots=True)
class Acceptance:
    """A fading share of drafts that were right. ``like``: what it is taken for before anything was tried."""

    like: "Acceptance | None" = None
    tried: float = 0.0
    accepted: float = 0.0

    def add(self, tried: int, accepted: int) -> None:
        """A block's verdict: the last of the tried is the wrong one, if any is."""
        for i in range(tried):
            self.tried = _MEMORY * self.tried + 1
            self.accepted = _MEMORY * self.accepted + (i < accepted)

    @property
    def share(self) -> float:
        """The probability that the next draft is right."""
        prior, weight = (_PRIOR, _PRIOR_WEIGHT) if self.like is None else (self.like.share, _REQUEST_WEIGHT)
        return (self.accepted + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class Sum:
    """So many of something took so long, in seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Some more."""
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class Counts:
    """Drafts since the start. By place in the block, from 0: how many were tried, how many of them right."""

    drafted: int = 0
    sent: int = 0  # in blocks that went to the other stages
    tried_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    accepted_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    blocks: int = 0
    void: int = 0  # of them behind a wrong draft, thrown away as a whole
    unsent: int = 0  # thrown away before they went to the other stages
    runs: dict[int, int] = field(default_factory=dict)  # how often so many in a row were right before a wrong one
    steps: dict[tuple[int, int], Sum] = field(default_factory=dict)  # of one sequence, by stage and rows
    drafting: Sum = field(default_factory=Sum)
    links: Sum = field(default_factory=Sum)  # round trips beyond computing

    def add(self, place: int, *, accepted: bool) -> None:
        """A draft was tried."""
        place = min(place, PLACES - 1)
        self.tried_at[place] += 1
        self.accepted_at[place] += accepted

    def as_dict(self) -> dict[str, object]:
        """Plain numbers."""
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
            "runs": dict(sorted(self.runs.items())),
            "steps": [[stage, rows, each.count, each.seconds] for (stage, rows), each in sorted(self.steps.items())],
            "drafting": [self.drafting.count, self.drafting.seconds],
            "links": [self.links.count, self.links.seconds],
        }


class Confidence:
    """What a drafter's confidence is worth: the share of drafts that were right, by tenths of it.

    A tenth that was never tried is taken to be like all drafts: models know less of each other than of themselves.
    """

    _WEIGHT = 4.0

    def __init__(self, like: Acceptance) -> None:
        self._like = like
        self._tried = [0.0] * BINS
        self._accepted = [0.0] * BINS

    def add(self, confidence: float, *, accepted: bool) -> None:
        """A draft was tried."""
        i = _bin(confidence)
        self._tried[i] += 1
        self._accepted[i] += accepted

    def share(self, confidence: float) -> float:
        """The probability that such a draft is right."""
        i = _bin(confidence)
        return (self._accepted[i] + self._WEIGHT * self._like.share) / (self._tried[i] + self._WEIGHT)


def _bin(confidence: float) -> int:
    return min(BINS - 1, max(0, int(confidence * BINS)))
