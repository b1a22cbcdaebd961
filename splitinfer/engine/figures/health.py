"""The health of a pipeline, in a few words: each stage's state, why requests wait, and why the pipeline has failed."""

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN_STAGE = "unknown"
"""The name under which losses of an unknown stage are counted."""


class StageState(StrEnum):
    """Whether a stage can compute."""

    READY = "ready"
    LOST = "lost"  # requests wait for its worker
    STOPPED = "stopped"  # the pipeline has failed


@dataclass(frozen=True, slots=True)
class StageHealth:
    """One stage, and its layers ``[start, end)``."""

    name: str
    start: int
    end: int
    state: StageState


@dataclass(frozen=True, slots=True)
class PipelineHealth:
    """The health of a pipeline. ``waits_for``: why requests wait, in a few words; ``failure``: why they are refused. At
    most one of them is set, and neither has an address. ``is_changing``: requests wait for another cut. ``absent``:
    what is said of workers that are away while the others hold their layers."""

    stages: tuple[StageHealth, ...]
    waits_for: str | None = None
    failure: str | None = None
    is_changing: bool = False
    absent: str | None = None

    @property
    def can_answer(self) -> bool:
        """Whether the pipeline computes requests now."""
        return self.waits_for is None and self.failure is None
