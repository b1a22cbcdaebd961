"""Counters of a pipeline since its start."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.plan import StepResult
from splitinfer.core.scheduler.room import UsualRequest
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.coordinator.health import UNKNOWN_STAGE


@dataclass(slots=True)
class StageTotals:
    """One stage's sums: seconds computing, steps, bytes of hidden states sent, rows of them that the link's codec could
    not represent, and bytes of stored KV copied, in ``copying`` seconds."""

    busy: float = 0.0
    steps: int = 0
    bytes_sent: int = 0
    rows_unfit: int = 0
    bytes_copied: int = 0
    copying: float = 0.0


@dataclass(slots=True)
class Totals:
    """Counters since the start. ``active``: seconds in which any request was under way.

    ``away``: seconds between a step's end on the coordinator's own layers and the arrival of its result, summed over
    the steps. With one stream, ``away`` minus the other stages' ``busy`` is the links' share; ``active`` minus ``away``
    and the coordinator's own ``busy`` is the loop's.
    """

    stages: list[StageTotals]
    active: float = 0.0
    away: float = 0.0
    computed_tokens: int = 0  # rows that went through the stages
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0  # of ended requests: those that their grammars left no choice of, computed as drafts
    rejoins: int = 0  # times a lost worker came back
    losses: dict[str, int] = field(default_factory=dict)  # by stage: times its worker was lost, or its device failed
    finished: dict[str, int] = field(default_factory=dict)
    _active_since: float | None = None

    def step(self, result: StepResult, now: float) -> None:
        """Add one step, whose result has just arrived."""
        for figures in result.figures:
            if figures.stage == 0:  # on the clock of this process
                self.away += now - figures.ended
            if 0 <= figures.stage < len(self.stages):
                stage = self.stages[figures.stage]
                stage.busy += figures.ended - figures.started
                stage.steps += 1
                stage.bytes_sent += figures.bytes_sent
                stage.rows_unfit += figures.unfit
                stage.bytes_copied += figures.bytes_copied
                stage.copying += figures.copying

    def is_active(self, active: bool, now: float) -> None:
        """Set whether any request is under way."""
        if self._active_since is not None:
            self.active += now - self._active_since
        self._active_since = now if active else None

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """Count a request that has ended."""
        self.prompt_tokens += sequence.num_prompt_tokens
        self.cached_tokens += sequence.num_cached or 0
        self.forced_tokens += sequence.drafts.num_jumped
        self.finished[reason.value] = self.finished.get(reason.value, 0) + 1

    def lost(self, stage: str | None) -> None:
        """Count a loss; ``None``: it is not known which stage's."""
        name = stage or UNKNOWN_STAGE
        self.losses[name] = self.losses.get(name, 0) + 1

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        count = sum(self.finished.values())
        if not count:
            return UsualRequest()
        return UsualRequest(self.generated_tokens / count, (self.prompt_tokens - self.cached_tokens) / count)

    def as_dict(self, names: Seq[str], now: float) -> dict[str, Any]:
        """The counters as plain numbers, for ``LLM.stats``."""
        active = self.active + (0.0 if self._active_since is None else now - self._active_since)
        sent = sum(stage.bytes_sent for stage in self.stages)
        return {
            "active_seconds": active,
            "away_seconds": self.away,
            "computed_tokens": self.computed_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "forced_tokens": self.forced_tokens,
            "rejoins": self.rejoins,
            "losses": dict(self.losses),
            "finished": dict(self.finished),
            "bytes_per_token": sent / self.computed_tokens if self.computed_tokens else 0.0,
            "stages": [
                {
                    "name": name,
                    "busy_seconds": stage.busy,
                    "busy_percent": 100 * stage.busy / active if active else 0.0,
                    "steps": stage.steps,
                    "bytes_sent": stage.bytes_sent,
                    "rows_unfit": stage.rows_unfit,
                    "bytes_copied": stage.bytes_copied,
                    "copy_seconds": stage.copying,
                }
                for name, stage in zip(names, self.stages, strict=False)  # another cut may come in between
            ],
        }
