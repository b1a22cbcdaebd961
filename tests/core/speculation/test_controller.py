"""What the controller makes of measurements: a pipeline on a virtual clock, and a drafter with a dial."""

from random import Random

import pytest

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.speculation.acceptance import Acceptance, Counts
from splitinfer.core.speculation.controller import Controller
from splitinfer.core.speculation.flight import OFF, Flight, best_flight, tokens_per_second

STAGE = {1: 10.0, 2: 11.0, 3: 12.0, 4: 12.0, 6: 14.0, 8: 14.0, 12: 18.0, 16: 18.0}  # ms


TABLE = RowCosts.through([STAGE, STAGE], 1.0, 0.0)


def untaught(most_in_flight: int = 1) -> Controller:
    return Controller(CostModel.of(2), most_in_flight)


def computed(controller: Controller, stage: int, rows: int, ms: float) -> None:
    controller.costs.stages[stage].took(Shape().plus(0, rows), ms)


class Played:
    """One request's blocks as the scheduler would ask for them, synchronously: time is added up, nothing runs."""

    def __init__(self, controller: Controller, acceptance: float, draft: float = 1.0, seed: int = 1) -> None:
        self.controller, self.acceptance, self.draft = controller, acceptance, draft
        self.dice, self.seconds, self.tokens = Random(seed), 0.0, 0
        self.flights: list[Flight] = []

    def block(self, seq_id: int = 1) -> None:
        flight = self.controller.flight(seq_id)
        self.flights.append(flight)
        drafts = flight.first
        took = drafts * self.draft + TABLE.computing(drafts + 1)
        for stage in range(2):
            computed(self.controller, stage, drafts + 1, TABLE.at(stage, drafts + 1))
        self.controller.costs.drafted(1, drafts, drafts * self.draft)
        right = 0
        while right < drafts and self.dice.random() < self.acceptance:
            right += 1
        if drafts:
            self.controller.tried(seq_id, min(drafts, right + 1), right)
        self.seconds += took
        self.tokens += right + 1

    def run(self, num_tokens: int, seq_id: int = 1) -> float:
        """Tokens per second of so many tokens."""
        before, since = self.tokens, self.seconds
        while self.tokens - before < num_tokens:
            self.block(seq_id)
        return (self.tokens - before) / (self.seconds - since)


def test_one_row_is_measured_before_any_draft() -> None:
    controller = untaught(2)
    assert controller.flight(1) == OFF
    computed(controller, 0, 1, 10.0)
    assert controller.flight(1) == OFF
    computed(controller, 1, 1, 10.0)
    assert not controller.flight(1).is_off


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_it_comes_close_to_the_best(acceptance: float) -> None:
    controller = untaught()
    played = Played(controller, acceptance)
    played.run(200)
    best = tokens_per_second(TABLE, best_flight(TABLE, acceptance, 1), acceptance)
    assert played.run(3000) > 0.93 * best


def test_drafts_that_are_never_right_cost_little() -> None:
    played = Played(untaught(), 0.0)
    assert played.run(64) > 0.92 / 20.0, "of a token a latency"
    assert played.run(1000) > 0.985 / 20.0
    played_anew = Played(played.controller, 0.0)
    assert played_anew.run(64, seq_id=2) > 0.97 / 20.0, "the next request begins with what is known"


def test_it_notices_when_drafts_become_right() -> None:
    played = Played(untaught(), 0.0)
    played.run(300)
    assert played.flights[-1].is_off
    played.acceptance = 0.9
    played.run(1500)
    assert sum(not flight.is_off for flight in played.flights[-50:]) > 40


def test_a_request_is_tried_whatever_others_had() -> None:
    """Texts differ: drafts that were never right in one request are often right in the next."""
    for seed in range(5):
        played = Played(untaught(), 0.0, seed=seed)
        played.run(400)
        played.acceptance = 0.7
        fresh = Played(untaught(), 0.7, seed=seed)
        fresh.run(60)
        assert played.run(160, seq_id=2) > 0.85 * fresh.run(160, seq_id=2), seed


def test_a_few_wrong_drafts_do_not_turn_them_off() -> None:
    """What pays by much and costs little is given up on evidence, and not on bad luck."""
    controller = untaught(2)
    for rows, seconds in STAGE.items():
        for stage in range(2):
            computed(controller, stage, rows, seconds * (0.6, 1.4)[stage])
    controller.costs.drafted(1, 1, 5.0)
    for _ in range(3):
        controller.tried(1, 1, 0)
    rig = controller.costs.for_one(0)
    assert rig is not None
    share = controller.share(1)
    assert tokens_per_second(rig, best_flight(rig, share, 2), share) < 1.03 * rig.sequential
    assert controller.flight(1).most_drafts > 1
    for _ in range(12):
        controller.tried(1, 1, 0)
    assert controller.flight(1).is_off


def test_dear_drafts_are_left_out() -> None:
    played = Played(untaught(), 0.5, draft=15.0)
    played.run(200)
    assert sum(not flight.is_off for flight in played.flights[-100:]) <= 3


def test_in_flight_where_there_are_stages_for_it() -> None:
    for most, expected in ((1, 1), (2, 2)):
        controller = untaught(most)
        for rows, seconds in STAGE.items():
            for stage in range(2):
                computed(controller, stage, rows, seconds * (0.6, 1.4)[stage])
        controller.costs.drafted(1, 10, 15.0)
        for _ in range(100):
            controller.tried(1, 5, 4)
        assert controller.flight(1).in_flight == expected
        assert controller.last == controller.flight(1)


def test_acceptance_starts_from_what_others_had_and_fades() -> None:
    everybody = Acceptance()
    assert everybody.share == pytest.approx(0.7)
    for _ in range(200):
        everybody.add(5, 4)
    assert everybody.share == pytest.approx(0.8, abs=0.03)
    mine = Acceptance(everybody)
    assert 0.7 < mine.share < everybody.share, "texts differ: a part of what is usual stays"
    assert everybody.at_most < mine.at_most, "little is known of it"
    for _ in range(60):
        mine.add(1, 0)
    assert mine.share < 0.15


def test_counts_add_up() -> None:
    counts = Counts()
    counts.add(0, accepted=True)
    counts.add(1, accepted=False)
    counts.add(99, accepted=True)
    found = counts.as_dict()
    assert found["acceptance"] == pytest.approx(2 / 3)
    assert (found["tried_at"][:2], found["accepted_at"][:2], found["tried_at"][-1]) == ([1, 1], [1, 0], 1)  # type: ignore[index]
    assert Counts().as_dict()["acceptance"] is None
