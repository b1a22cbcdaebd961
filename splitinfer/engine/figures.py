"""What the pipeline did, added up from the figures that every step brings back anyway."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.plan import StepResult


@dataclass(slots=True)
class StageTotals:
    """One stage's sums: seconds computing, steps, bytes of hidden states sent on."""

    busy: float = 0.0
    steps: int = 0
    bytes_sent: int = 0


@dataclass(slots=True)
class Totals:
    """Everything since the start; ``active`` is the seconds in which any request was under way.

    ``away``: seconds between a step's end on the coordinator's own layers and the arrival of its result,
    added up over the steps. With one stream, what is left of it after the other stages' ``busy`` is the
    links'; what is left of ``active`` after it and the own ``busy`` is the loop's.
    """

    stages: list[StageTotals]
    active: float = 0.0
    away: float = 0.0
    computed_tokens: int = 0  # rows that went through the stages
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    rejoins: int = 0  # times a lost worker came back
    finished: dict[str, int] = field(default_factory=dict)
    _active_since: float | None = None

    def step(self, result: StepResult, now: float) -> None:
        """Add one step, whose result has just come."""
        for figures in result.figures:
            if figures.stage == 0:  # its clock is ours
                self.away += now - figures.ended
            if 0 <= figures.stage < len(self.stages):
                stage = self.stages[figures.stage]
                stage.busy += figures.ended - figures.started
                stage.steps += 1
                stage.bytes_sent += figures.bytes_sent

    def is_active(self, active: bool, now: float) -> None:
        """Say whether any request is under way."""
        if self._active_since is not None:
            self.active += now - self._active_since
        self._active_since = now if active else None

    def as_dict(self, names: Sequence[str], now: float) -> dict[str, Any]:
        """Plain numbers for ``LLM.stats``."""
        since = self._active_since  # read once: the engine's thread may change it
        active = self.active + (now - since if since is not None else 0.0)
        sent = sum(stage.bytes_sent for stage in self.stages)
        return {
            "active_seconds": active,
            "away_seconds": self.away,
            "computed_tokens": self.computed_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "rejoins": self.rejoins,
            "finished": dict(self.finished),
            "bytes_per_token": sent / self.computed_tokens if self.computed_tokens else 0.0,
            "stages": [
                {
                    "name": name,
                    "busy_seconds": stage.busy,
                    "busy_percent": 100 * stage.busy / active if active else 0.0,
                    "steps": stage.steps,
                    "bytes_sent": stage.bytes_sent,
                }
                for name, stage in zip(names, self.stages, strict=True)
            ],
        }
