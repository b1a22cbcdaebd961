"""Computes figures of one trial and of several from clock readings. Pure.

Many sequences do not start together, because their prompts are read one after the other. So only a *window* counts, in
which all of them decode and no prompt is left to read:

    sequence 0   --prompt--|1 2 3 4 5 6 7 8 9|
    sequence 1       --prompt----|1 2 3 4 5 6 7 8 9|
    window                            |######|           the last one's third token to the first one's last

Its tokens come in bursts, all of a step at once, so a count divided by the window's length would depend on the bursts
that its edges cut. Each sequence's own rate, between its own first and last token in the window, does not depend on
them; the throughput is the sum of these rates.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ConfigError

BEGINS_AT = 3  # tokens after which a sequence certainly decodes


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return the trials as one figure of a document: ``median``, ``low``, ``high`` and the ``values``."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "values": list(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the ratios of ours to theirs, trial by trial. A disturbance of a whole trial cancels out."""
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
    """One answer. ``token_times``: the seconds from the request to each token."""

    token_ids: tuple[int, ...]
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, without the first token."""
        return (len(self.token_times) - 1) / (self.token_times[-1] - self.token_times[0])


def throughput(runs: Sequence[Run]) -> float:
    """Return the tokens a second of all answers together, in the window. All times count from the first request.

    Raises:
        ConfigError: the first answers ended before the last ones had begun, so there is no rate.
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
