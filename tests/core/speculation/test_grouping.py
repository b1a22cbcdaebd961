"""The choice of groups and drafts: beside every other choice, within its bounds, and as costs and sequences change."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.costs.model import CostModel
from splitinfer.core.plan import Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.group_controller import GroupController
from splitinfer.core.speculation.grouping import (
    _SLOWER,
    LONGEST,
    Grouping,
    Member,
    best_grouping,
    emitted,
    period,
    shapes,
    without_drafts,
)


def table(*points: tuple[int, float], most: int = 128) -> tuple[float, ...]:
    """Milliseconds by rows, interpolated."""
    found = [0.0]
    for rows in range(1, most + 1):
        (a, x), (b, y) = next((pair for pair in pairwise(points) if rows <= pair[1][0]), points[-2:])
        found.append(x + (y - x) * (rows - a) / (b - a))
    return tuple(found)


LARGE = RowCosts(
    (
        table((1, 47), (8, 52), (16, 75), (32, 140), (128, 545)),
        table((1, 31), (8, 34), (16, 50), (32, 92), (128, 360)),
    ),
    (0.0, *(3.0 + 0.06 * n for n in range(64))), 0.3, 0.5, 128,
)  # fmt: skip


def best(costs: RowCosts, acceptance: list[float], **more: object):
    found = best_grouping(costs, [Member(a) for a in acceptance], len(costs.stages), **more)  # type: ignore[arg-type]
    return max(found.values(), key=lambda one: one.rate)


def every(costs: RowCosts, acceptance: list[float], groups: int, most: int) -> float:
    """The best rate of all numbers of drafts, within the bounds of the choice."""
    gap = without_drafts(costs, [Member(0.0)] * len(acceptance), len(costs.stages))
    rate = 0.0
    for drafts in product(range(most + 1), repeat=len(acceptance)):
        mine = [drafts[group::groups] for group in range(groups)]
        rows = [sum(count + 1 for count in each) for each in mine]
        rounds = [max(each) * costs.round(sum(count > 0 for count in each)) for each in mine]
        seconds = period(costs, rows, rounds)
        tokens = [emitted(a, count) for a, count in zip(acceptance, drafts, strict=True)]
        if seconds <= LONGEST * gap and min(tokens) * _SLOWER * gap >= seconds:
            rate = max(rate, sum(tokens) / seconds)
    return rate


# -- beside every other choice ---------------------------------------------------------------------


@given(st.lists(st.floats(0, 0.95), min_size=2, max_size=4), st.floats(0.5, 6))
def test_greedy_comes_close_to_the_best_of_all(acceptance: list[float], draft: float) -> None:
    acceptance = sorted(acceptance, reverse=True)
    costs = RowCosts(LARGE.stages, (0.0, *([draft] * 8)), 0.3, 0.5, 128)
    found = best_grouping(costs, [Member(a) for a in acceptance], 2)
    expected = max(every(costs, acceptance, groups, 6) for groups in (1, 2))
    assert max(found[groups, 1].rate for groups in (1, 2) if (groups, 1) in found) >= 0.9 * expected


@pytest.mark.parametrize(
    ("num_members", "acceptance", "gain"),
    [(2, 0.8, 2.6), (4, 0.8, 2.1), (8, 0.8, 1.55), (16, 0.8, 1.1), (2, 0.6, 1.9), (4, 0.6, 1.5), (8, 0.6, 1.25)],
)
def test_what_it_expects_of_a_large_model_on_two_machines(num_members: int, acceptance: float, gain: float) -> None:
    today = num_members / without_drafts(LARGE, [Member(0.0)] * num_members, 2)
    assert best(LARGE, [acceptance] * num_members).rate > gain * today


def test_one_group_reads_the_weights_once_where_rows_are_free() -> None:
    none = RowCosts(LARGE.stages, (), 0.3)
    assert best(none, [0.0] * 4).groups == 1, "78 ms for all of them, to 94 for two groups"
    assert best(none, [0.0] * 16).groups == 2
    linear = RowCosts((table((1, 10), (100, 1000)),) * 2, (), 0.3)
    assert best(linear, [0.0] * 4).groups == 2


def test_whoever_is_never_right_gets_no_drafts_and_loses_nothing() -> None:
    choice = best(LARGE, [0.0, 0.95])
    gap = without_drafts(LARGE, [Member(0.0)] * 2, 2)
    assert choice.drafts[0] == 0
    assert choice.drafts[1] >= 2
    assert choice.gap <= gap


def test_the_objective_bounds_the_gap() -> None:
    free, tight = best(LARGE, [0.9] * 8), best(LARGE, [0.9] * 8, objective=125.0)
    assert free.gap <= LONGEST * without_drafts(LARGE, [Member(0.0)] * 8, 2)
    assert tight.gap <= 125.0 < free.gap
    assert best(LARGE, [0.9] * 4, objective=400.0).gap > LONGEST * without_drafts(LARGE, [Member(0.0)] * 4, 2)


def test_sizes_that_nobody_has_tried_are_tried_little_by_little() -> None:
    few = RowCosts(LARGE.stages, LARGE.drafts, 0.3, 0.5, 8)
    choice = best(few, [0.9] * 4)
    assert sum(count + 1 for count in choice.drafts[:: choice.groups]) <= 8


def test_fixed_drafts_stay_fixed() -> None:
    members = [Member(0.1, 5, fixed=True), Member(0.9)]
    found = max(best_grouping(LARGE, members, 2).values(), key=lambda one: one.rate)
    assert found.drafts[0] == 5


def test_shapes_have_a_step_for_every_stage() -> None:
    assert list(shapes(4, 2, 2, flies=False)) == [(1, 1), (2, 1)]
    assert list(shapes(4, 3, 3, flies=True)) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    assert list(shapes(1, 3, 3, flies=False)) == [(1, 1)]


def test_what_rules_force_counts_as_rows_and_as_tokens() -> None:
    """Four sequences go together where a step of them is cheap, and in two groups where each brings six rows."""
    costs = RowCosts(LARGE.stages, (), 0.3, 0.5, 128)
    for forced, groups in ((0.0, 1), (5.0, 2)):
        found = best_grouping(costs, [Member(0.0, 0, forced=forced)] * 4, 2)
        chosen = max(found.values(), key=lambda one: one.rate)
        assert chosen.groups == groups
        rows = 4 * (1 + forced) / groups
        assert chosen.rate == pytest.approx(4 * (1 + forced) / period(costs, [round(rows)] * groups, [0.0] * groups))


# -- the controller --------------------------------------------------------------------------------


def step(
    number: int, rows: int, start: float, seconds: tuple[float, ...], drafts: int = 0
) -> tuple[StepPlan, StepResult]:
    slices = tuple(Slice(i, 9, tuple(range(drafts + 1)), drafts + 1, drafts) for i in range(rows // (drafts + 1)))
    figures, at = [], start
    for stage, took in enumerate(seconds):
        figures.append(StageFigures(stage, at, at + took, received=at, rows=rows))
        at += took
    return StepPlan(number, slices=slices), StepResult(number, (), tuple(figures))


def returned(
    controller: GroupController, plan: StepPlan, result: StepResult, at: float = 0.0, since: float | None = None
) -> None:
    controller.costs.learn(plan.slices, result.figures, at, since)
    controller.returned(plan)


def learned(*rows: int, num_stages: int = 2) -> GroupController:
    controller, at = GroupController(CostModel.of(num_stages), num_stages), 0.0
    for number, count in enumerate(rows):
        seconds = tuple(LARGE.at(stage % 2, count) for stage in range(num_stages))
        plan, result = step(number, count, at, seconds)
        at += sum(seconds) + 0.6
        returned(controller, plan, result, at)
    return controller


def choose(controller: GroupController, acceptance: list[float], objective: float | None = None) -> None:
    members = {i: Member(a) for i, a in enumerate(acceptance)}
    controller.choose(members, objective, has_drafter=True)


def test_nothing_is_chosen_before_anything_is_known() -> None:
    controller = GroupController(CostModel.of(2), 2)
    choose(controller, [0.8] * 4)
    assert controller.choice is None
    assert controller.flights == {}
    controller = learned(1, 2, 4, 8)
    choose(controller, [0.8] * 4)
    assert {flight.first for flight in controller.flights.values()} == {1}, "one draft each, to learn what it costs"


@pytest.mark.parametrize(("rate", "groups"), [(103.0, 2), (106.0, 1)])
def test_another_number_of_groups_has_to_be_clearly_better(rate: float, groups: int) -> None:
    controller = GroupController(CostModel.of(2), 2)
    found = {(1, 1): Grouping(1, rate=rate), (2, 1): Grouping(2, rate=100.0)}
    assert controller._stays(found).groups == 1, "nothing was chosen before"
    controller.choice = Grouping(2, rate=90.0)
    assert controller._stays(found).groups == groups
    controller._may_change = False
    assert controller._stays(found).groups == 2, "it has just changed"


def test_it_chooses_again_when_somebody_comes_or_goes_and_now_and_then() -> None:
    controller = learned(1, 2, 4, 8)
    controller.costs.drafted(1, 1, 3.0)
    choose(controller, [0.8] * 2)
    assert not controller.is_due(frozenset((0, 1)))
    assert controller.is_due(frozenset((0, 1, 2)))
    for number in range(16):
        returned(controller, *step(number, 4, 0.0, (50.0, 33.0)), 84.0)
    assert not controller.is_due(frozenset((0, 1))), "what follows on a result must not depend on it"
    assert controller.is_due(frozenset((0, 1)), has_learned=True)


def test_drafts_that_do_not_pay_are_off() -> None:
    controller = learned(1, 2, 4, 8, 16)
    controller.costs.drafted(8, 1, 60.0)
    choose(controller, [0.5] * 8)
    assert controller.choice is not None
    assert not controller.choice.has_drafts
    assert controller.probe_cost() > 1.0


def test_one_member_that_was_unlucky_at_first_does_not_end_the_drafts_of_all() -> None:
    """One of 16 usually is. On what few tries show, it would be slower than without drafts, and stay so untried."""
    prior, unlucky = Acceptance(), Acceptance()
    prior.add(8, 6)
    unlucky.like = prior
    for _ in range(3):
        unlucky.add(1, 0)
    usual = [Member(0.75, at_most=0.9)] * 15
    controller = learned(*range(1, 17))
    controller.costs.drafted(16, 1, 3.0)
    for number in range(8):
        if number == 2:
            assert controller.choice is not None
            assert controller.choice.has_drafts, "3 tries"
        members = [*usual, Member(unlucky.share, at_most=unlucky.seen_at_most)]
        controller.choose(dict(enumerate(members)), None, has_drafter=True)
        unlucky.add(1, 0)
    assert not controller.choice.has_drafts, "it is never right: nobody is to wait for others' drafts"


def test_a_host_that_is_held_up_now_and_then_changes_no_choice() -> None:
    """The bound on gaps is near what one draft for each of 16 costs; with a mean of the host it is beyond."""
    controller, at = learned(*range(1, 17)), 0.0
    controller.costs.drafted(16, 1, 3.0)
    choose(controller, [0.8] * 16)
    assert controller.choice is not None
    before = controller.choice
    for number in range(65):
        held_up = 20.0 if number % 4 == 0 else 0.5
        plan, result = step(1000 + number, 8, at + held_up, (LARGE.at(0, 8), LARGE.at(1, 8)))
        since, at = at, at + held_up + LARGE.at(0, 8) + LARGE.at(1, 8) + 0.6
        returned(controller, plan, result, at, since)
    choose(controller, [0.8] * 16)
    assert before.has_drafts
    assert controller.choice.drafts == before.drafts


def test_steps_with_prompts_are_nothing_to_choose_by() -> None:
    controller = GroupController(CostModel.of(2), 2)
    figures = tuple(StageFigures(stage, 0.0, 5.0, rows=3) for stage in range(2))
    returned(controller, StepPlan(0, slices=(Slice(0, 0, (1, 2, 3), 1),)), StepResult(0, (), figures), 11.0)
    choose(controller, [0.8] * 4)
    assert controller.choice is None, "what a row with logits costs is not known"
