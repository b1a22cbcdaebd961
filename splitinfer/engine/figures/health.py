"""How a pipeline is, in a few words: each stage's state, what is waited for, and why it can answer no more."""

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN_STAGE = "unknown"
"""The name under which losses are counted where it is not known whose they were."""


class StageState(StrEnum):
    """Whether a stage can compute."""

    READY = "ready"
    LOST = "lost"  # its worker is waited for
    STOPPED = "stopped"  # with the pipeline


@dataclass(frozen=True, slots=True)
class StageHealth:
    """One stage, and its layers ``[start, end)``."""

    name: str
    start: int
    end: int
    state: StageState


@dataclass(frozen=True, slots=True)
class PipelineHealth:
    """``waits_for``: what keeps requests waiting, in a few words; ``failure``: why none is taken any more. At most one
    of them is set, and neither has an address. ``is_changing``: what is waited for is another cut of the layers."""

    stages: tuple[StageHealth, ...]
    waits_for: str | None = None
    failure: str | None = None
    is_changing: bool = False

    @property
    def can_answer(self) -> bool:
        """Whether requests are carried out now."""
        return self.waits_for is None and self.failure is None
