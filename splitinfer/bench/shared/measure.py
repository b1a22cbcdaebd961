"""Computes figures from clock readings and counters. Pure.

Where a token's time goes, with one stream and without drafts, so that the stages take turns:

    coordinator  |--host--|--compute--|                                   |--host--|
    worker                               |--compute--|
                                      hop             ... hops back

*compute* is what each stage reports of itself: from building the step's graph to its end. The rest of the
time between two tokens is *host* (the coordinator learns, plans and shows the token) and *hops* (bytes made,
sent, received, and threads woken). They can be told apart only if the engine counts ``away_seconds``: from
the end of a step on the coordinator's own layers to the arrival of its result.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Summary = dict[str, Any]
"""Several trials as one figure of a document: ``median``, ``low``, ``high``, the ``values``, and their ``spread``: the
distance of the quartiles in percent of the median."""


def summarize(values: Sequence[float]) -> Summary:
    """The median and the spread of at least one value."""
    median = statistics.median(values)
    first, _, third = statistics.quantiles(values, method="inclusive") if len(values) > 1 else (median,) * 3
    spread = 100 * (third - first) / abs(median) if median else 0.0
    return {"median": median, "low": min(values), "high": max(values), "spread": spread, "values": list(values)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of some ordered values that at least ``share`` of them do not exceed.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.51), quantile([1], 0.99)
    (2, 3, 1)
    """
    rank = -(-round(share * len(ordered) * 1e9) // 10**9)
    return ordered[max(0, min(len(ordered), rank) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Ratios of ours to theirs, trial by trial: what slows a whole trial down divides out."""
    return summarize([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading of ``LLM.stats``, or the difference of two. One entry for each stage, but the last two.

    ``away``: seconds from the end of steps on the coordinator's layers to their results, where it is counted.
    """

    busy: tuple[float, ...]
    steps: tuple[int, ...]
    sent: tuple[int, ...]
    tokens: int
    away: float | None = None

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "Counters":
        """The counters in a reading of ``LLM.stats``."""
        stages = stats["stages"]
        return cls(
            busy=tuple(stage["busy_seconds"] for stage in stages),
            steps=tuple(stage["steps"] for stage in stages),
            sent=tuple(stage["bytes_sent"] for stage in stages),
            tokens=stats["generated_tokens"],
            away=stats.get("away_seconds"),
        )

    def __sub__(self, earlier: "Counters") -> "Counters":
        away = None if self.away is None or earlier.away is None else self.away - earlier.away
        return Counters(
            busy=tuple(a - b for a, b in zip(self.busy, earlier.busy, strict=True)),
            steps=tuple(a - b for a, b in zip(self.steps, earlier.steps, strict=True)),
            sent=tuple(a - b for a, b in zip(self.sent, earlier.sent, strict=True)),
            tokens=self.tokens - earlier.tokens,
            away=away,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one task. ``token_times``: seconds since its start, one for each token.

    ``spent``: the stages' counters meanwhile, where there are stages: of a prefill, all of it; of a decode, from about
    the first token to about the last but one (the last step of a request also frees its KV). Whoever reads them may be
    some tokens behind the engine: ``before`` is the number of tokens that the first reading had counted.
    """

    token_ids: tuple[int, ...]
    token_times: tuple[float, ...]
    spent: Counters | None = None
    before: int = 1

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0]

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token of a decode, the first token left out."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def counted_seconds_per_token(self) -> float:
        """The same for the tokens that ``spent`` covers."""
        assert self.spent is not None
        last = self.before - 1 + self.spent.tokens
        return (self.token_times[last] - self.token_times[self.before - 1]) / self.spent.tokens


@dataclass(frozen=True, slots=True)
class Causes:
    """Seconds of one token by cause: computing on each stage, hops between stages, and the coordinator.

    ``hops`` and ``host`` are ``None`` where they cannot be told apart; their sum always is known.
    """

    compute: tuple[float, ...]
    hops_and_host: float
    hops: float | None = None
    host: float | None = None


def causes(spent: Counters, seconds_per_token: float) -> Causes:
    """The time of a token by cause, on average over the counted tokens. Counters and times are read at slightly
    different moments, so of few tokens hops can seem longer than all time but computing: they are no more than that."""
    compute = tuple(busy / spent.tokens for busy in spent.busy)
    rest = seconds_per_token - sum(compute)
    if spent.away is None:
        return Causes(compute, rest)
    hops = min(max(0.0, spent.away / spent.tokens - sum(compute[1:])), max(0.0, rest))
    return Causes(compute, rest, hops, rest - hops)


def prefill_share(num_chunks: int, num_stages: int) -> float:
    """The least share of one stage's time that a prompt of C chunks takes on S equal stages.

    A chunk takes 1 of C parts of the time on one stage, and 1 of C * S on each of S. The last chunk enters the
    first stage after C - 1 of those, and leaves the last one S later.

    >>> prefill_share(4, 2), prefill_share(1, 3)
    (0.625, 1.0)
    """
    return (num_chunks + num_stages - 1) / (num_chunks * num_stages)
