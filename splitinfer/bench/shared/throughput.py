"""Many sequences at once: computes figures from the times of their tokens. Pure.

Sequences do not start together, because their prompts are read one after the other. What is counted is a *window* in
which all of them decode, and no prompt is left to read:

    sequence 0   --prompt--|1 2 3 4 5 6 7 8 9|
    sequence 1       --prompt----|1 2 3 4 5 6 7 8 9|
    window                            |######|           the last one's third token to the first one's last

Its tokens come in bursts, a step's all at once, so counting them by the window's length would depend on which
bursts its edges cut. Each sequence's own rate, between its own first and last token in the window, does not; the
throughput is their sum.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ConfigError

BEGINS_AT = 3  # a sequence with so many tokens decodes for certain


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The outcome of many sequences. Times are seconds since the first was submitted, one for each token.

    ``window``: what the stages did in the window (``since``), where there are stages.
    """

    token_ids: tuple[tuple[int, ...], ...]
    token_times: tuple[tuple[float, ...], ...]
    window: Mapping[str, Any] | None = None

    @property
    def start(self) -> float:
        """The start of the window, in seconds."""
        return max(times[BEGINS_AT - 1] for times in self.token_times)

    @property
    def end(self) -> float:
        """The end of the window, in seconds."""
        return min(times[-1] for times in self.token_times)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all sequences together, in the window."""
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in self._within)

    @property
    def itl(self) -> tuple[float, ...]:
        """The seconds between two tokens of a sequence in the window, in ascending order."""
        pairs = (itertools.pairwise(times) for times in self._within)
        return tuple(sorted(later - earlier for earlier, later in itertools.chain(*pairs)))

    @property
    def last_ttft(self) -> float:
        """Seconds to the first token of the sequence that waited longest."""
        return max(times[0] for times in self.token_times)

    @property
    def seconds(self) -> float:
        """Seconds to the last token of all sequences."""
        return max(times[-1] for times in self.token_times)

    @property
    def _within(self) -> list[tuple[float, ...]]:
        start, end = self.start, self.end
        return [tuple(t for t in times if start <= t <= end) for times in self.token_times]

    def check(self) -> None:
        """Refuse a run whose window is too short for a rate.

        Raises:
            ConfigError: the first answers were over before the last ones had begun.
        """
        if min(map(len, self._within)) < 2:
            raise ConfigError(
                f"{len(self.token_times)} answers of {len(self.token_times[0])} tokens never all went on at once: "
                "the first were over before the last had begun; give more with --stream-tokens"
            )


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the stages did between two readings of ``LLM.stats``: steps, and each stage's seconds and shares."""
    rows, useful = (after[key] - before[key] for key in ("computed_tokens", "useful_tokens"))
    stages = []
    for was, now in zip(before["stages"], after["stages"], strict=True):
        busy = now["busy_seconds"] - was["busy_seconds"]
        gaps = {cause: seconds - was["idle_seconds"][cause] for cause, seconds in now["idle_seconds"].items()}
        whole = busy + sum(gaps.values())
        duty = 100 * busy / whole if whole else 0.0
        goodput = duty * useful / rows if rows else 0.0
        stages.append({"busy_seconds": busy, "gaps": gaps, "duty_percent": duty, "goodput_duty_percent": goodput})
    return {"steps": after["stages"][0]["steps"] - before["stages"][0]["steps"], "stages": stages}


def step_seconds(window: Mapping[str, Any]) -> tuple[float, ...]:
    """The seconds that each stage computed for one step, on average over the window."""
    return tuple(stage["busy_seconds"] / window["steps"] for stage in window["stages"])


def best_ratio(seconds: Sequence[float]) -> float:
    """The most that stages gain by computing at once instead of one after the other.

    One after the other, a step of n rows takes the sum of their times. At once, each has another n rows, and a step
    is done whenever the slowest stage is.

    >>> best_ratio([2.0, 2.0]), best_ratio([3.0, 1.0])
    (2.0, 1.3333333333333333)
    """
    return sum(seconds) / max(seconds)
