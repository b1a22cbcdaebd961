"""How long requests waited and took, and how large they were: distributions since the start, by vLLM's bounds.

A request's life, with the phases that are told apart:

    submitted ---- queue ---- first step ---- prefill ---- first token ---- decode ---- last token
                              |--------------------- inference ---------------------|
    |------------------------------------- whole ----------------------------------------------- ended

A phase that a request never came to is not counted. The time between tokens is counted once for each step that brought
a request any: drafts that were right come together, at one time. Bounds, and what is counted when, are those of vLLM
0.33.0 (``vllm/v1/metrics/buckets.py``, ``stats.py``), for whose dashboards they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from splitinfer.core.metrics.distribution import Distribution, Histogram
from splitinfer.core.sequence import Sequence

LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = tuple(2**n for n in (0, *range(3, 15)))  # 1, 8, 16, ... 16,384
TOKENS = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))  # read up to the context
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)


BOUNDS: Mapping[str, tuple[float, ...]] = {
    "first_token": FIRST_TOKEN,  # seconds from the submission
    "between_tokens": BETWEEN_TOKENS,
    "each_token": BETWEEN_TOKENS,  # a request's mean, without its first
    "whole": LATENCIES,
    "queue": LATENCIES,
    "prefill": LATENCIES,
    "decode": LATENCIES,
    "inference": LATENCIES,
    "prompt": TOKENS,
    "computed_prompt": TOKENS,  # without what was kept
    "generated": TOKENS,
    "max_tokens": TOKENS,
    "preemptions": PREEMPTIONS,
    "step_tokens": STEP_TOKENS,  # rows of a step
}
"""What is counted, by name, and the bounds."""


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """A reading. ``prompt_tokens``, ``cached_tokens``: of prompts whose first token has come. ``histograms``: by the
    names of ``BOUNDS``."""

    prompt_tokens: int
    cached_tokens: int
    histograms: Mapping[str, Histogram]


@dataclass(slots=True)
class RequestUnderWay:
    """What all figures know of a request under way.

    submitted, first, last: when it was submitted, had its first token, and its last one (before: ``submitted``).
    computed: positions of it that steps have brought so far.
    """

    sequence: Sequence
    submitted: float
    last: float
    first: float | None = None
    computed: int = 0


class RequestMeters:
    """Counts requests. Times are seconds on one clock, the scheduler's. Used by one thread at a time.

    ``under_way``: by ``seq_id``, from ``submitted`` to ``ended``.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, RequestUnderWay] = {}
        self._counted = {name: Distribution(bounds) for name, bounds in BOUNDS.items()}
        self._prompt_tokens = self._cached_tokens = 0

    def submitted(self, sequence: Sequence, at: float) -> None:
        """A request was submitted at ``at``."""
        self.under_way[sequence.seq_id] = RequestUnderWay(sequence, at, at)

    def planned(self, num_tokens: int) -> None:
        """A step was planned, of so many rows."""
        if num_tokens:
            self._counted["step_tokens"].add(num_tokens)

    def token(self, request: RequestUnderWay, now: float) -> None:
        """A request has a token. All that one step brings have the same time."""
        if request.first is None:
            request.first = now
            self._counted["first_token"].add(now - request.submitted)
            self._prompt_tokens += request.sequence.num_prompt_tokens
            self._cached_tokens += request.sequence.num_cached or 0
        elif now != request.last:
            self._counted["between_tokens"].add(now - request.last)
        request.last = now

    def ended(self, seq_id: int, now: float) -> None:
        """A request has ended, whichever way."""
        request = self.under_way.pop(seq_id)
        self._count_times(request, now)
        self._count_sizes(request)

    def _count_times(self, request: RequestUnderWay, now: float) -> None:
        counted, begun, first, last = self._counted, request.sequence.begun_at, request.first, request.last
        counted["whole"].add(now - request.submitted)
        if begun is None:
            return
        counted["queue"].add(begun - request.submitted)
        if first is None:
            return
        counted["prefill"].add(first - begun)
        counted["decode"].add(last - first)
        counted["inference"].add(last - begun)
        if (further := request.sequence.num_generated - 1) > 0:
            counted["each_token"].add((last - first) / further)

    def _count_sizes(self, request: RequestUnderWay) -> None:
        counted, sequence = self._counted, request.sequence
        counted["prompt"].add(sequence.num_prompt_tokens)
        counted["computed_prompt"].add(sequence.num_prompt_tokens - (sequence.num_cached or 0))
        counted["generated"].add(sequence.num_generated)
        counted["max_tokens"].add(sequence.params.max_tokens)
        counted["preemptions"].add(sequence.num_preemptions)

    def read(self) -> RequestFigures:
        """What was counted so far."""
        histograms = {name: counted.read() for name, counted in self._counted.items()}
        return RequestFigures(self._prompt_tokens, self._cached_tokens, histograms)
