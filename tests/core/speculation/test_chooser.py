"""The choice of groups and drafts: what its formula expects, its bounds, and its trials; and on described machines in
virtual time that it is never slower than no drafts by more than those cost."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.plan import Slice, StepPlan
from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.chooser import LONGEST, GroupChoice, GroupChooser, Member, drafts_of, emitted, expected
from splitinfer.core.speculation.flight import OFF, Flight
from tests.core.given_costs import GivenCosts, GivenStage
from tests.emulation.files import read_machine
from tests.emulation.machine import Machine
from tests.sim.pipelines import rates, rates_without_drafts

LARGE = (
    GivenStage({1: 47, 8: 52, 16: 75, 32: 140, 128: 545}),
    GivenStage({1: 31, 8: 34, 16: 50, 32: 92, 128: 360}),
)  # ms


def costs(draft: float = 3.0, more: float = 0.06) -> CostModel:
    return GivenCosts(list(LARGE), 0.3, drafts=GivenStage({1: draft, 2: draft + more}), host=0.5)


def chooser(draft: float = 3.0, more: float = 0.06, rows: int = 64) -> GroupChooser:
    """One that has seen steps of up to so many rows."""
    found = GroupChooser(costs(draft, more), 2)
    found.returned(StepPlan(0, slices=tuple(Slice(i, 9, (1,), 1) for i in range(rows))))
    return found


def choose(one: GroupChooser, acceptance: list[float], objective: float | None = None, **member: object) -> GroupChoice:
    for seq_id, right in enumerate(acceptance):
        for n in range(200):
            one.tried(seq_id, 1, int((n * right) % 1 + right >= 1))
    one.choose({i: Member(**member) for i in range(len(acceptance))}, objective, has_drafter=True)  # type: ignore[arg-type]
    assert one.choice is not None
    return one.choice


@pytest.mark.parametrize(("drafts", "share"), [(1, 0.5), (4, 0.8), (15, 0.9)])
def test_tokens_of_a_block_are_those_up_to_the_first_wrong_draft(drafts: int, share: float) -> None:
    assert emitted(share, drafts) == pytest.approx(sum(share**k for k in range(drafts + 1)))
    assert emitted(share, drafts, 2) > emitted(share, drafts)


def test_everybody_gets_the_drafts_that_are_worth_as_much() -> None:
    members = [Member(share=share) for share in (0.9, 0.81, 0.5, 0.0)]
    assert drafts_of(members, 4) == [4, 2, 1, 0]
    assert drafts_of(members, 4, least=1) == [4, 2, 1, 1]
    assert drafts_of([Member(share=0.9, most=3), Member(share=0.9)], 6) == [3, 6]


@pytest.mark.parametrize("acceptance", [[0.9] * 2, [0.75] * 4, [0.6] * 8, [0.9, 0.9, 0.3]])
def test_no_other_number_of_drafts_is_expected_to_be_better(acceptance: list[float]) -> None:
    one = chooser()
    best = choose(one, acceptance)
    members = [one._with_shares(i, Member()) for i in range(len(acceptance))]
    gap = expected(one.costs, members, min(2, len(members)), 1, [0] * len(members)).gap
    for groups, count in product((1, 2), range(8)):
        other = expected(one.costs, members, groups, 1, [count] * len(members))
        if other.gap <= LONGEST * gap:
            assert other.rate <= 1.051 * best.rate, (groups, count)


def test_a_gap_is_bounded_by_the_objective() -> None:
    free = choose(chooser(), [0.9] * 8)
    assert choose(chooser(), [0.9] * 8, objective=110.0).gap <= 110.0 < free.gap
    assert choose(chooser(), [0.9] * 8, objective=400.0).rate >= free.rate


def test_no_more_rows_than_twice_what_was_tried() -> None:
    assert choose(chooser(rows=5), [0.9] * 4).rows <= 10


def test_blocks_that_a_request_has_asked_for_are_not_chosen_again() -> None:
    one = chooser()
    one.choose({0: Member(flight=Flight(2)), 1: Member(flight=OFF)}, None, has_drafter=True)
    assert one.choice is not None
    assert one.choice.drafts == (2, 0)


def test_before_anything_is_known_nothing_is_chosen_and_then_drafts_are_tried() -> None:
    one = GroupChooser(CostModel.of(2), 2)
    one.choose({0: Member(), 1: Member()}, None, has_drafter=True)
    assert one.choice is None
    assert set(one.flights.values()) == {OFF}
    one = chooser()
    one.costs.drafts = StageCosts()
    one.choose({0: Member(), 1: Member()}, None, has_drafter=True)
    assert set(one.flights.values()) == {Flight(1)}, "to learn what they cost"


def test_it_chooses_again_when_somebody_comes_or_goes_and_now_and_then() -> None:
    one = chooser()
    choose(one, [0.8] * 2)
    assert not one.is_due(frozenset((0, 1)))
    assert one.is_due(frozenset((0, 1, 2)))
    for _ in range(16):
        one.returned(StepPlan(1))
    assert not one.is_due(frozenset((0, 1))), "what follows on a result must not depend on it"
    assert one.is_due(frozenset((0, 1)), has_learned=True)


def trials(one: GroupChooser, seq_id: int, blocks: int, *, is_right: bool) -> int:
    """Of so many blocks, those with drafts, all of which are right or wrong."""
    count = 0
    for _ in range(blocks):
        flight = one.flight(seq_id)
        if not flight.is_off:
            count += 1
            one.tried(seq_id, 1, int(is_right))
    return count


def test_a_drafter_that_is_never_right_is_tried_seldom_and_not_for_every_request() -> None:
    one = chooser(draft=20.0)
    choose(one, [0.0])
    assert trials(one, 0, 2000, is_right=False) < 30
    for seq_id in range(1, 21):
        one.forget(seq_id - 1)
        one.choose({seq_id: Member()}, None, has_drafter=True)
        assert one.flights[seq_id].is_off, "what the others had is known"
    assert sum(trials(one, 20, 20, is_right=False) for _ in range(12)) <= 3


def test_what_a_drafter_reads_for_trials_is_a_small_part_of_the_time() -> None:
    """Each request has a prompt that takes as long to read as thirty tokens."""
    one, passes = chooser(draft=20.0), 0
    choose(one, [0.0])
    assert one.choice is not None
    seconds = 30 / one.choice.rate
    for seq_id in range(40):
        one.choose({seq_id: Member()}, None, has_drafter=True)
        assert not one.is_likely(seq_id), "nothing is read ahead"
        tried = trials(one, seq_id, 100, is_right=False)
        one.read(seq_id, seconds * min(tried, 1))
        passes += tried
        one.forget(seq_id)
    assert 1 <= passes <= 4
    assert not one.is_likely(40), "a prompt that is still computed"


def test_a_drafter_that_is_right_reads_ahead() -> None:
    one = chooser()
    assert one.is_likely(0), "nothing is known"
    choose(one, [0.9])
    assert one.is_likely(0)
    one.choose({}, None, has_drafter=True)
    assert one.is_likely(1), "what the others had is known"


def test_trials_that_are_right_turn_drafts_on() -> None:
    one = chooser()
    choose(one, [0.0])
    trials(one, 0, 500, is_right=False)
    tokens = 0
    while one.flights[0].is_off:
        trials(one, 0, 1, is_right=True)
        one.choose({0: Member()}, None, has_drafter=True)
        tokens += 1
    assert tokens < 50


def test_acceptance_starts_from_what_others_had_and_fades() -> None:
    everybody = Acceptance()
    assert everybody.share == pytest.approx(0.7)
    for _ in range(200):
        everybody.add(5, 4)
    assert everybody.share == pytest.approx(0.8, abs=0.03)
    mine = Acceptance(everybody)
    assert mine.share == pytest.approx(everybody.share)
    assert everybody.at_most < mine.at_most, "little is known of it"
    for _ in range(60):
        mine.add(1, 0)
    assert mine.share < 0.25


def test_a_text_that_changes_begins_anew() -> None:
    mine = Acceptance()
    for _ in range(200):
        mine.add(10, 9)
    for _ in range(12):
        mine.add(1, 0)
    assert mine.share < 0.5


def test_few_who_go_in_one_group_do_not_keep_many_there() -> None:
    one = chooser()
    for _ in range(1000):
        one.returned(StepPlan(1))
    assert [choose(one, [0.75] * streams).groups for streams in (4, 1, 2, 4)] == [2, 1, 1, 2]


LOSES = 0.02  # of the speed without drafts, at most: learning what they cost, and trials
MACHINES = ("two-large", "two-small", "three-large")
FIXED = ((1, 0), (3, 0), (7, 0), (0, 1), (1, 2), (3, 4))  # drafts of first and further blocks
USUAL = {("two-large", 1, False), ("three-large", 2, True)}


@pytest.mark.parametrize(
    ("name", "streams", "at_end"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.nightly)
        for case in product(MACHINES, (1, 2, 4, 8), (False, True))
    ],
)
def test_it_is_never_slower_than_no_drafts(name: str, streams: int, *, at_end: bool) -> None:
    machine = replace(read_machine(Path(name)), drafts_at_end=at_end)
    none = sum(rates_without_drafts(machine, streams))
    for acceptance, least in ((0.0, 1 - LOSES), (0.2, 1 - LOSES), (0.5, 1.1), (0.9, 1.6)):
        assert sum(rates(machine, (acceptance,) * streams)) >= least * none, acceptance


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.95])
def test_drafts_whose_rows_are_read_from_disk(acceptance: float) -> None:
    """A row costs a step nearly as much as its first. What is chosen is as good as what is best there, and that is not
    what is best where further rows are nearly free."""
    disk, free = (read_machine(Path(name)) for name in ("two-experts-on-disk", "two-large"))
    flights = [OFF, *(Flight(first, further, 2 if further else 1) for first, further in FIXED)]

    def by_flight(machine: Machine) -> list[float]:
        return [sum(rates(machine, (acceptance,), flight=flight)) for flight in flights]

    found = by_flight(disk)
    assert sum(rates(disk, (acceptance,))) >= 0.95 * max(found)
    best = by_flight(free)
    assert acceptance == 0 or found.index(max(found)) != best.index(max(best))


@pytest.mark.parametrize("name", ["two-large", pytest.param("three-large", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("acceptance", [(0.9, 0.0), pytest.param((0.9, 0.9, 0.0, 0.3), marks=pytest.mark.nightly)])
def test_nobody_is_slower_because_of_others_drafts(name: str, acceptance: tuple[float, ...]) -> None:
    machine = read_machine(Path(name))
    none, live = rates_without_drafts(machine, len(acceptance)), rates(machine, acceptance)
    assert min(live) >= 0.85 * min(none), "nothing was known of it at first"
    assert sum(live) > (1 - LOSES) * sum(none)
