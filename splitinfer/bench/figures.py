"""Figures of one trial and of several, from clock readings. Pure.

Many sequences do not start together, because their prompts are read one after the other. What is counted of them is a
*window* in which all of them decode, and no prompt is left to read:

    sequence 0   --prompt--|1 2 3 4 5 6 7 8 9|
    sequence 1       --prompt----|1 2 3 4 5 6 7 8 9|
    window                            |######|           the last one's third token to the first one's last

Its tokens come in bursts, a step's all at once, so counting them by the window's length would depend on which
bursts its edges cut. Each sequence's own rate, between its own first and last token in the window, does not; the
throughput is their sum.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ConfigError

BEGINS_AT = 3  # a sequence with so many tokens decodes for certain


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return several trials as one figure of a document: ``median``, ``low``, ``high`` and the ``values``."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "values": list(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return ratios of ours to theirs, trial by trial: what slows a whole trial down divides out."""
    return summarize([a / b for a, b in zip(ours, theirs, strict=True)])


def prefill_share(num_chunks: int, num_stages: int) -> float:
    """Return the least share of one stage's time that a prompt of C chunks takes on S equal stages.

    A chunk takes 1 of C parts of the time on one stage, and 1 of C * S on each of S. The last chunk enters the
    first stage after C - 1 of those, and leaves the last one S later.

    >>> prefill_share(4, 2), prefill_share(1, 3)
    (0.625, 1.0)
    """
    return (num_chunks + num_stages - 1) / (num_chunks * num_stages)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. ``token_times``: seconds since it was asked for, one for each token."""

    token_ids: tuple[int, ...]
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, the first token left out."""
        return (len(self.token_times) - 1) / (self.token_times[-1] - self.token_times[0])


def throughput(runs: Sequence[Run]) -> float:
    """Return the tokens a second of all answers together, in the window. Times are since the first was asked for.

    Raises:
        ConfigError: the first answers were over before the last ones had begun, so there is no rate.
    """
    every = [run.token_times for run in runs]
    start, end = max(times[BEGINS_AT - 1] for times in every), min(times[-1] for times in every)
    within = [[at for at in times if start <= at <= end] for times in every]
    if min(map(len, within)) < 2:
        raise ConfigError(
            f"{len(every)} answers of {len(every[0])} tokens never all went on at once: "
            "the first were over before the last had begun; give more with --decode-tokens"
        )
    return sum((len(times) - 1) / (times[-1] - times[0]) for times in within)
