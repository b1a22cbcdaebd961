"""What has not been sent yet may still be made void; what was taken to be sent may not."""

from dataclasses import replace

from splitinfer.core.plan import Slice, StepPlan
from splitinfer.engine.coordinator.unsent import Unsent

PLAIN = StepPlan(0, slices=(Slice(1, 0, (5, 6), 1),))
DRAFTED = StepPlan(1, slices=(Slice(1, 2, (7, 8), 2, num_drafts=2), Slice(2, 0, (9,), 1)))


def without_drafts(plan: StepPlan) -> StepPlan:
    return replace(plan, slices=tuple(part for part in plan.slices if not part.begins_with_draft))


def test_only_plans_with_drafts_are_asked_about() -> None:
    unsent, asked = Unsent(), list[StepPlan]()
    unsent.add(PLAIN)
    assert not unsent.has_drafts
    unsent.add(DRAFTED)
    assert unsent.has_drafts
    unsent.reduce(lambda plan: asked.append(plan) or plan)
    assert asked == [DRAFTED]


def test_what_is_taken_is_what_is_still_wanted_and_stays() -> None:
    unsent = Unsent()
    unsent.add(PLAIN)
    unsent.add(DRAFTED)
    assert 1 in unsent
    unsent.reduce(without_drafts)
    assert unsent.take(DRAFTED) == without_drafts(DRAFTED)
    assert 1 not in unsent
    assert unsent.take(PLAIN) is PLAIN
    unsent.reduce(without_drafts)
    assert unsent.take(DRAFTED) is DRAFTED, "nobody knows it any more"


def test_a_plan_that_was_reduced_is_reduced_again() -> None:
    both = replace(DRAFTED, slices=(DRAFTED.slices[0], replace(DRAFTED.slices[0], seq_id=3)))
    unsent = Unsent()
    unsent.add(both)
    unsent.reduce(lambda plan: replace(plan, slices=plan.slices[:1]))
    unsent.reduce(lambda plan: replace(plan, slices=plan.slices[1:]))
    assert unsent.take(both).slices == ()


def test_after_a_loss_all_is_forgotten() -> None:
    unsent = Unsent()
    unsent.add(DRAFTED)
    unsent.clear()
    assert not unsent.has_drafts
    assert 1 not in unsent
