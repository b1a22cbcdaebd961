"""The record of a step in flight: one in the coordinator, from plan to result, which all parts refer to."""

from dataclasses import dataclass

from splitinfer.core.plan import StepPlan


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step between its plan and its result.

    plan: what is still wanted of it; until it leaves the first stage, results take void slices out of it.
    idle_since: from when on the coordinator had nothing to do but this step and its drafts, if that is known, in
        seconds on the first stage's clock.
    """

    plan: StepPlan
    idle_since: float | None = None
