"""The steps that have not left the coordinator yet: what a result makes void of them is not sent.

The loop learns of void drafts, and another thread may be about to send them; so what is still wanted of a step is
decided under a lock, up to the moment at which it is taken to be sent.
"""

import threading
from collections.abc import Callable

from splitinfer.core.plan import StepPlan


class Unsent:
    """Plans launched on the coordinator's device and not sent yet, by their numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[int, StepPlan] = {}

    def add(self, plan: StepPlan) -> None:
        """Take a plan that is about to be launched."""
        with self._lock:
            self._plans[plan.step] = plan

    @property
    def has_drafts(self) -> bool:
        """Whether a result could make void what is unsent."""
        with self._lock:
            return any(_can_be_void(plan) for plan in self._plans.values())

    def reduce(self, still_wanted: Callable[[StepPlan], StepPlan]) -> None:
        """Replace each plan that holds drafts by what is still wanted of it."""
        with self._lock:
            for step, plan in self._plans.items():
                if _can_be_void(plan):
                    self._plans[step] = still_wanted(plan)

    def take(self, plan: StepPlan) -> StepPlan:
        """What is to be sent of a plan, from now on unchanged."""
        with self._lock:
            return self._plans.pop(plan.step, plan)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._plans.clear()


def _can_be_void(plan: StepPlan) -> bool:
    return any(part.begins_with_draft for part in plan.slices)
