"""The record of a step in flight: one in the coordinator, from plan to result, which all parts refer to."""

from dataclasses import dataclass

from splitinfer.core.plan import StageFigures, StepPlan


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step between its plan and its result. Each note has one writer, and seconds are on the first stage's clock.

    planned: what the stages were to do.
    plan: what is still wanted of it; until it leaves the first stage, results take rejected slices out (the scheduler).
    idle_since: from when on the coordinator had nothing to do but this step and its drafts, if that is known (the
        scheduler).
    launched_at, limit: when it was launched, and seconds after which it counts as stuck (``core.liveness``).
    is_sent: whether it has left the first stage, so that its plan stays as it is (`Pipeline`).
    figures: the first stage's, which stay here while the step is on its way (`Pipeline`).
    """

    planned: StepPlan
    plan: StepPlan
    idle_since: float | None = None
    launched_at: float | None = None
    limit: float = 0.0
    is_sent: bool = False
    figures: StageFigures | None = None

    @classmethod
    def of(cls, plan: StepPlan, idle_since: float | None = None) -> "StepInFlight":
        """A step that was just planned."""
        return cls(plan, plan, idle_since)

    @property
    def can_be_rejected(self) -> bool:
        """Whether a result could reject a part of it."""
        return any(part.begins_with_draft for part in self.plan.slices)
