"""Latency and throughput as users see them: the same figures for a simulation and for the live system."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from splitinfer.sim.simulator import Served

_STALLED = 3.0  # times the median gap: a stall, where there is no objective


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of durations in seconds; zeros if there are none."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(*(quantile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0))) if ordered else cls()


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of some ordered values that at least ``share`` of them do not exceed.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.51), quantile([1], 0.99)
    (2, 3, 1)
    """
    rank = -(-round(share * len(ordered) * 1e9) // 10**9)
    return ordered[max(0, min(len(ordered), rank) - 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of some requests.

    seconds: from the first arrival to the last token.
    ttft: from a request's arrival to its first token.
    itl: between two tokens, all requests pooled.
    delay: from a request's arrival until its first slice was planned.
    stalled: share of gaps between tokens that are longer than the objective, or than three times the median without.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    ttft: Spread
    itl: Spread
    delay: Spread
    stalled: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self), "tokens_per_second": self.tokens_per_second, "requests_per_second": self.requests_per_second
        }  # fmt: skip


def outcome_of(served: Iterable[Served], objective: float | None = None) -> Outcome:
    """The figures of the requests that got tokens. ``objective``: seconds between two tokens, at most."""
    done = [one for one in served if one.token_times]
    gaps = [b - a for one in done for a, b in pairwise(one.token_times)]
    limit = objective if objective is not None else _STALLED * statistics.median(gaps) if gaps else 0.0
    return Outcome(
        len(done),
        sum(len(one.token_times) for one in done),
        max((one.token_times[-1] for one in done), default=0.0) - min((one.at for one in done), default=0.0),
        Spread.of(one.token_times[0] - one.at for one in done),
        Spread.of(gaps),
        Spread.of(one.delay for one in done if one.delay is not None),
        sum(gap > limit for gap in gaps) / len(gaps) if gaps else 0.0,
    )
