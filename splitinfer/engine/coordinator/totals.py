"""Counters of a pipeline since its start, made of the records of its steps and requests.

What is counted of requests, and when, is what vLLM 0.33.0 counts (``vllm/v1/metrics/buckets.py``, ``stats.py``), for
whose dashboards it is. A phase that a request never came to is not counted. The time between tokens is counted once for
each step that brought a request any: drafts that were right come together.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.metrics.histogram import BETWEEN_TOKENS, LATENCIES, SECONDS, TOKENS, Histogram
from splitinfer.core.metrics.records import RequestRecord, StepRecord
from splitinfer.core.scheduler.room import UsualRequest
from splitinfer.engine.coordinator.health import UNKNOWN_STAGE

STEP_ROWS = tuple(2**n for n in (0, *range(3, 15)))  # 1, 8, 16, ... 16,384
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "first_token": SECONDS,  # from the submission
    "between_tokens": SECONDS,
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
    "preemptions": (1, 2, 3, 4, 5, 10, 20),
    "step_rows": STEP_ROWS,
}
"""Histograms by name, and their bounds."""


@dataclass(slots=True)
class StageTotals:
    """One stage's sums: steps, bytes of hidden states sent, rows of them that the link's codec could not represent, and
    bytes of stored KV copied, in ``copying`` seconds."""

    steps: int = 0
    bytes_sent: int = 0
    rows_unfit: int = 0
    bytes_copied: int = 0
    copying: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The sums as plain numbers."""
        return {
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "rows_unfit": self.rows_unfit,
            "bytes_copied": self.bytes_copied,
            "copy_seconds": self.copying,
        }


@dataclass(slots=True)
class Totals:
    """Counters since the start; ``stages``: since the present cut was loaded.

    away: seconds between a step's end on the coordinator's own layers and the arrival of its result, summed over the
        steps. With one stream, ``away`` minus the other stages' busy time is the links' share.
    useful_rows: those whose result was kept, each counted once.
    forced_tokens: of ended requests, those that their grammars left no choice of, computed as drafts.
    losses: by stage, times its worker was lost, or its device failed; rejoins: times that all stages were back.
    """

    stages: list[StageTotals] = field(default_factory=list)
    away: float = 0.0
    rows: int = 0
    useful_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    rejoins: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
    )
    _active: float = 0.0  # seconds with any request under way, up to the last change
    _active_since: float | None = None

    def step(self, step: StepRecord) -> None:
        """Count a step."""
        self.away += step.heard - step.figures[0].ended
        self.rows += step.num_rows
        self.useful_rows += step.useful
        if step.num_rows:
            self.histograms["step_rows"].add(step.num_rows)
        for gained in step.gained:
            self.histograms["first_token" if gained.prompt else "between_tokens"].add(gained.seconds)
            self.generated_tokens += gained.tokens
            self.prompt_tokens += gained.prompt
            self.cached_tokens += gained.cached
        for stage, figures in zip(self.stages, step.figures, strict=True):
            stage.steps += 1
            stage.bytes_sent += figures.bytes_sent
            stage.rows_unfit += figures.unfit
            stage.bytes_copied += figures.bytes_copied
            stage.copying += figures.copying

    def request(self, request: RequestRecord) -> None:
        """Count a request that has ended."""
        self.forced_tokens += request.forced
        self.finished[request.reason.value] = self.finished.get(request.reason.value, 0) + 1
        sizes = {
            "prompt": request.prompt,
            "computed_prompt": request.prompt - request.cached,
            "generated": request.generated,
            "max_tokens": request.max_tokens,
            "preemptions": request.preemptions,
        }
        for name, value in {**_phases(request), **sizes}.items():
            self.histograms[name].add(value)

    def is_active(self, active: bool, now: float) -> None:
        """Set whether any request is under way."""
        self._active, self._active_since = self.active_seconds(now), now if active else None

    def active_seconds(self, now: float) -> float:
        """Seconds in which any request was under way."""
        return self._active + (0.0 if self._active_since is None else now - self._active_since)

    def lost(self, stage: str | None) -> None:
        """Count a loss; ``None``: it is not known which stage's."""
        name = stage or UNKNOWN_STAGE
        self.losses[name] = self.losses.get(name, 0) + 1

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        generated, computed = self.histograms["generated"], self.histograms["computed_prompt"]
        count = generated.count
        return UsualRequest(generated.total / count, computed.total / count) if count else UsualRequest()

    def read_histograms(self) -> dict[str, Histogram]:
        """What was counted so far, by the names of ``BOUNDS``."""
        return deepcopy(self.histograms)

    def as_dict(self, now: float) -> dict[str, Any]:
        """The counters as plain numbers, for ``LLM.stats``."""
        sent = sum(stage.bytes_sent for stage in self.stages)
        return {
            "active_seconds": self.active_seconds(now),
            "away_seconds": self.away,
            "computed_tokens": self.rows,
            "useful_tokens": self.useful_rows,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "forced_tokens": self.forced_tokens,
            "ttft_seconds": self.histograms["first_token"].as_dict(50, 90, 99),
            "itl_seconds": self.histograms["between_tokens"].as_dict(50, 90, 99),
            "rejoins": self.rejoins,
            "losses": dict(self.losses),
            "finished": dict(self.finished),
            "bytes_per_token": sent / self.rows if self.rows else 0.0,
        }


def _phases(request: RequestRecord) -> dict[str, float]:
    """The seconds of each phase that a request came to."""
    found = {"whole": request.ended - request.submitted}
    if request.begun is None:
        return found
    found["queue"] = request.begun - request.submitted
    if request.first is None:
        return found
    found |= {
        "prefill": request.first - request.begun,
        "decode": request.last - request.first,
        "inference": request.last - request.begun,
    }
    if request.generated > 1:
        found["each_token"] = found["decode"] / (request.generated - 1)
    return found
