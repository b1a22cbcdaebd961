"""Many sequences at once: from the times of their tokens to figures. Pure.

Sequences do not begin together, because their prompts are read one after the other, and some decode before others
do. What is counted is a *window* in which all of them decode, and nobody reads a prompt any more:

    sequence 0   --prompt--|1 2 3 4 5 6 7 8 9|
    sequence 1       --prompt----|1 2 3 4 5 6 7 8 9|
    window                            |######|           the last one's third token to the first one's last

Its tokens come in bursts, a step's all at once, so counting them by the window's length would depend on which
bursts its edges cut. Each sequence's own rate, between its own first and last token in the window, does not; the
throughput is their sum.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import ConfigError

BEGINS_AT = 3  # the token of every sequence with which it decodes for certain


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Many sequences done. Times are seconds since the first was submitted, one for each token.

    ``window`` is what the stages did in the window (``LLM.stats``), where there are stages.
    """

    token_ids: tuple[tuple[int, ...], ...]
    token_times: tuple[tuple[float, ...], ...]
    window: Mapping[str, Any] | None = None

    @property
    def start(self) -> float:
        """The window's first moment."""
        return max(times[BEGINS_AT - 1] for times in self.token_times)

    @property
    def end(self) -> float:
        """The window's last moment."""
        return min(times[-1] for times in self.token_times)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, in the window."""
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in self._within)

    @property
    def itl(self) -> tuple[float, ...]:
        """The seconds between two tokens of a sequence in the window, in order of size."""
        pairs = (itertools.pairwise(times) for times in self._within)
        return tuple(sorted(later - earlier for earlier, later in itertools.chain(*pairs)))

    @property
    def last_ttft(self) -> float:
        """Seconds to the first token of the sequence that had to wait longest."""
        return max(times[0] for times in self.token_times)

    @property
    def seconds(self) -> float:
        """To the last token of all."""
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


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of them do not exceed.

    >>> quantile([1.0, 2.0, 3.0, 10.0], 0.5), quantile([1.0, 2.0, 3.0, 10.0], 0.99)
    (2.0, 10.0)
    """
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def step_seconds(window: Mapping[str, Any]) -> tuple[float, ...]:
    """What each stage computed for one step, on average over the window."""
    return tuple(stage["busy_seconds"] / window["steps"] for stage in window["stages"])


def best_ratio(seconds: Sequence[float]) -> float:
    """The most that stages gain by computing at once instead of one after the other.

    One after the other, a step of n rows takes the sum of their times. At once, each has another n rows, and a
    step comes out whenever the slowest is done.

    >>> best_ratio([2.0, 2.0]), best_ratio([3.0, 1.0])
    (2.0, 1.3333333333333333)
    """
    return sum(seconds) / max(seconds)
