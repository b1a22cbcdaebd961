"""Counters of a pipeline since its start, made of the records of its steps and requests.

Requests are counted as in vLLM 0.33.0 (``vllm/v1/metrics/buckets.py``, ``stats.py``), so that its dashboards work. A
phase that a request never reached is not counted. The time between tokens is counted once for each step that brought a
request tokens, because right drafts arrive together.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.core.metrics.histogram import BETWEEN_TOKENS, LATENCIES, SECONDS, TOKENS, Histogram
from splitinfer.core.metrics.records import RequestRecord, StepRecord
from splitinfer.core.scheduler.retry_after import UsualRequest
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.figures.health import UNKNOWN_STAGE

_STEP_ROWS = tuple(2**n for n in (0, *range(3, 15)))  # 1, 8, 16, ... 16,384
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "first_token": SECONDS,  # from the submission
    "between_tokens": SECONDS,
    "each_token": BETWEEN_TOKENS,  # a request's mean, without its first token
    "whole": LATENCIES,
    "queue": LATENCIES,
    "prefill": LATENCIES,
    "decode": LATENCIES,
    "inference": LATENCIES,
    "prompt": TOKENS,
    "computed_prompt": TOKENS,  # without cached tokens
    "generated": TOKENS,
    "max_tokens": TOKENS,
    "preemptions": (1, 2, 3, 4, 5, 10, 20),
    "step_rows": _STEP_ROWS,
}
"""Histograms by name, and their bounds."""

# Numbers by the keys of ``LLM.stats``. "away_seconds": the time between a step's end on the coordinator's own layers
# and the arrival of its result, summed over the steps. With one stream, "away_seconds" minus the other stages' busy
# time is the links' share.
_COUNTS = (
    *("away_seconds", "computed_tokens", "useful_tokens", "prompt_tokens", "cached_tokens", "generated_tokens"),
    *("forced_tokens", "rejoins"),
)
_OF_STAGES = (
    *("steps", "bytes_sent", "rows_unfit", "bytes_copied", "copy_seconds"),
    *("experts_wanted", "experts_found", "experts_read", "experts_waiting"),
)


class Totals:
    """Counters by name. ``stages``: the counters of each stage since the current cut was loaded."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        self.stages: list[dict[str, float]] = []
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self._finished: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        self._bytes_sent = 0  # by the stages of all cuts
        self._active = 0.0  # seconds with an open request, up to the last change
        self._active_since: float | None = None

    def begin_cut(self, num_stages: int) -> None:
        """Start the stages' counters again, for the stages of another cut."""
        self.stages = [dict.fromkeys(_OF_STAGES, 0) for _ in range(num_stages)]

    def step(self, step: StepRecord) -> None:
        """Count a step."""
        counts = self.counts
        counts["away_seconds"] += step.heard - step.figures[0].ended
        counts["computed_tokens"] += step.num_rows
        counts["useful_tokens"] += step.useful
        if step.num_rows:
            self.histograms["step_rows"].add(step.num_rows)
        for gained in step.gained:
            self.histograms["first_token" if gained.prompt else "between_tokens"].add(gained.seconds)
            counts["generated_tokens"] += gained.tokens
            counts["prompt_tokens"] += gained.prompt
            counts["cached_tokens"] += gained.cached
        for stage, figures in zip(self.stages, step.figures, strict=True):
            stage["steps"] += 1
            stage["bytes_sent"] += figures.bytes_sent
            self._bytes_sent += figures.bytes_sent
            stage["rows_unfit"] += figures.unfit
            stage["bytes_copied"] += figures.bytes_copied
            stage["copy_seconds"] += figures.copying
            for name in ("experts_wanted", "experts_found", "experts_read", "experts_waiting"):
                stage[name] += getattr(figures, name)

    def request(self, request: RequestRecord, reason: FinishReason, now: float) -> None:
        """Count a request that has ended."""
        sequence = request.sequence
        self.counts["forced_tokens"] += sequence.drafts.num_jumped
        self._finished[reason.value] = self._finished.get(reason.value, 0) + 1
        sizes = {
            "prompt": sequence.num_prompt_tokens,
            "computed_prompt": sequence.num_prompt_tokens - (sequence.num_cached or 0),
            "generated": sequence.num_generated,
            "max_tokens": sequence.params.max_tokens,
            "preemptions": sequence.num_preemptions,
        }
        for name, value in {**_phases(request, now), **sizes}.items():
            self.histograms[name].add(value)

    def is_active(self, active: bool, now: float) -> None:
        """Set whether any request is open."""
        self._active, self._active_since = self.active_seconds(now), now if active else None

    def active_seconds(self, now: float) -> float:
        """Return the seconds during which any request was open."""
        return self._active + (0.0 if self._active_since is None else now - self._active_since)

    def lost(self, stage: str | None) -> None:
        """Count the loss of a stage. ``stage``: ``None`` if it is not known."""
        name = stage or UNKNOWN_STAGE
        self._losses[name] = self._losses.get(name, 0) + 1

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        generated, computed = self.histograms["generated"], self.histograms["computed_prompt"]
        count = generated.count
        return UsualRequest(generated.total / count, computed.total / count) if count else UsualRequest()

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the counters of the whole pipeline as plain numbers, for ``LLM.stats``."""
        rows = self.counts["computed_tokens"]
        return {
            **self.counts,
            "active_seconds": self.active_seconds(now),
            "ttft_seconds": self.histograms["first_token"].as_dict(50, 90, 99),
            "itl_seconds": self.histograms["between_tokens"].as_dict(50, 90, 99),
            "losses": dict(self._losses),
            "finished": dict(self._finished),
            "bytes_per_token": self._bytes_sent / rows if rows else 0.0,
        }


def _phases(request: RequestRecord, ended: float) -> dict[str, float]:
    """Return the seconds of each phase that a request reached."""
    found = {"whole": ended - request.submitted}
    begun = request.sequence.begun_at
    if begun is None:
        return found
    found["queue"] = begun - request.submitted
    if request.first is None:
        return found
    found["prefill"] = request.first - begun
    found["decode"] = request.last - request.first
    found["inference"] = request.last - begun
    if request.sequence.num_generated > 1:
        found["each_token"] = found["decode"] / (request.sequence.num_generated - 1)
    return found
