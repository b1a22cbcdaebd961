"""How many steps of emulated accelerators were late: computing them took longer than the device would have.

The emulator notes it in a step's figures. The benchmark says so with its figures, which mean nothing where more than
one step in a thousand was late.
"""

from dataclasses import dataclass

from splitinfer.core.plan import StepResult

LATE = "late"  # the note
MOST_LATE = 0.001  # share of steps


@dataclass(slots=True)
class LateSteps:
    """The steps on all stages of all pipelines of this process, and how many of them were late."""

    steps: int = 0
    late: int = 0

    def count(self, result: StepResult) -> None:
        """Count one step's visits to all stages."""
        self.steps += len(result.figures)
        self.late += sum(LATE in each.notes for each in result.figures)

    @property
    def share(self) -> float:
        """The share that was late."""
        return self.late / self.steps if self.steps else 0.0

    @property
    def are_too_many(self) -> bool:
        """Whether figures of this process mean nothing."""
        return self.share > MOST_LATE


LATE_STEPS = LateSteps()
