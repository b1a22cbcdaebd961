"""How many steps of emulated accelerators were void: computing them took longer than the device would have.

The benchmark says so with its figures, which mean nothing where more than one step in a thousand was void.
"""

from dataclasses import dataclass

from splitinfer.core.plan import StepResult

MOST_VOID = 0.001  # share of steps


@dataclass(slots=True)
class VoidSteps:
    """The steps on all stages of all pipelines of this process, and how many of them were void."""

    steps: int = 0
    void: int = 0

    def count(self, result: StepResult) -> None:
        """Count one step's visits to all stages."""
        self.steps += len(result.figures)
        self.void += sum(each.is_void for each in result.figures)

    @property
    def share(self) -> float:
        """The share that was void."""
        return self.void / self.steps if self.steps else 0.0

    @property
    def are_too_many(self) -> bool:
        """Whether figures of this process mean nothing."""
        return self.share > MOST_VOID


VOID_STEPS = VoidSteps()
