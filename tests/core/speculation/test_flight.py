"""What a flight gives: the sum over blocks against blocks flown with dice, and against the limits."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.speculation.flight import (
    FIRSTS,
    FURTHERS,
    OFF,
    Flight,
    best_flight,
    resumed,
    tokens_per_second,
)

KERNELS = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.15, 6: 1.4, 8: 1.35, 12: 1.6, 16: 1.7}  # a table, and no line


def rig(share: float = 0.4, draft: float = 0.05, link: float = 0.02, stages: int = 2) -> RowCosts:
    parts = [share, *[(1 - share) / (stages - 1)] * (stages - 1)] if stages > 1 else [1.0]
    return RowCosts.through([{n: part * t for n, t in KERNELS.items()} for part in parts], draft, link)


def flown(rig: RowCosts, flight: Flight, acceptance: float, num_runs: int, seed: int) -> float:
    """Tokens per second of ``num_runs`` runs, with a die for every draft and a clock for every stage."""
    dice, now, tokens = Random(seed), 0.0, 0
    for _ in range(num_runs):
        right = 0
        while dice.random() < acceptance:
            right += 1
        now += run_time(rig, flight, right)
        tokens += right + 1
    return tokens / now


def run_time(rig: RowCosts, flight: Flight, right: int) -> float:
    """One run with so many right drafts, event by event: until the coordinator has heard that the next was wrong."""
    clock, stage_free, verdicts = 0.0, [0.0] * len(rig.stages), []
    covered, heard = 0, math.inf
    while True:
        is_first = not verdicts
        drafts, rows = (flight.first, flight.first + 1) if is_first else (flight.further, flight.further)
        if len(verdicts) >= flight.in_flight:
            clock = max(clock, verdicts[-flight.in_flight])
        if clock >= heard:
            return clock
        steps = [rig.draft] * drafts + [rig.at(0, rows)]
        for step in steps:
            clock += step
            if clock > heard:  # it listens between two steps
                return clock
        done = clock
        for i in range(1, len(rig.stages)):
            stage_free[i] = done = max(stage_free[i], done + rig.link) + rig.at(i, rows)
        verdicts.append(done + rig.link)
        was_covered, covered = covered, covered + drafts
        # Whether the draft after the covered ones is right is said by this block's last row.
        if was_covered <= right <= covered and heard == math.inf:
            heard = verdicts[-1]


@pytest.mark.parametrize(
    ("flight", "acceptance", "stages"),
    [
        (Flight(3, 4, 2), 0.3, 2), (Flight(1, 1, 2), 0.9, 3), (Flight(7, 8, 2), 0.8, 2), (Flight(2, 6, 3), 0.6, 3),
        (Flight(5, 2, 4), 0.8, 3),
    ],
)  # fmt: skip
def test_it_is_what_dice_give(flight: Flight, acceptance: float, stages: int) -> None:
    r = rig(stages=stages)
    assert tokens_per_second(r, flight, acceptance) == pytest.approx(flown(r, flight, acceptance, 30_000, 5), rel=0.02)


def test_synchronous_blocks_are_the_textbook() -> None:
    r = rig()
    for k in FIRSTS:
        tokens = sum(0.8**i for i in range(k + 1))
        expected = tokens / (k * 0.05 + r.latency(k + 1))
        assert tokens_per_second(r, Flight(k), 0.8) == pytest.approx(expected)
        assert tokens_per_second(r, Flight(k, 4, 1), 0.8) == pytest.approx(expected)


def test_without_drafts_it_is_one_token_a_latency() -> None:
    assert tokens_per_second(rig(), OFF, 0.9) == rig().sequential == pytest.approx(1 / 1.04)
    assert rig(stages=1).sequential == pytest.approx(1.0), "one stage has no links"


@given(
    st.floats(0.0, 1.0), st.sampled_from(FIRSTS), st.sampled_from(FURTHERS), st.integers(1, 3),
    st.floats(0.0, 0.3), st.floats(0.0, 0.3), st.floats(0.1, 0.9),
)  # fmt: skip
def test_no_flight_passes_the_limit(
    a: float, first: int, further: int, in_flight: int, draft: float, link: float, share: float
) -> None:
    r = rig(share, draft, link)
    assert 0 < tokens_per_second(r, Flight(first, further, in_flight), a) <= r.bound(a) * 1.0001


@given(st.floats(0.0, 0.99), st.floats(0.0, 0.3), st.floats(0.0, 0.2))
def test_the_best_is_the_best(a: float, draft: float, link: float) -> None:
    r = rig(draft=draft, link=link)
    best = tokens_per_second(r, best_flight(r, a, 2), a)
    assert best >= 0.99 * r.sequential
    for flight in (Flight(3), Flight(7), Flight(3, 4, 2), Flight(1, 2, 2), Flight(7, 8, 2)):
        assert best >= 0.99 * tokens_per_second(r, flight, a)


def test_of_equally_fast_ones_the_one_with_fewest_drafts() -> None:
    r = rig(0.3)
    best = best_flight(r, 0.6, 2)
    larger = Flight(best.first, 2 * best.further, 2)
    assert tokens_per_second(r, larger, 0.6) > 0.97 * tokens_per_second(r, best, 0.6)
    assert best.most_drafts < larger.most_drafts
    assert (Flight(3).most_drafts, Flight(3, 4, 1).most_drafts, Flight(3, 4, 3).most_drafts) == (3, 3, 11)


def test_drafts_that_are_never_right_are_best_left_out() -> None:
    assert best_flight(rig(), 0.0, 2) == OFF


def test_blocks_in_flight_beat_waiting_and_hide_the_link() -> None:
    near, far = rig(0.3, link=0.0), rig(0.3, link=0.1)
    gains = []
    for r in (near, far):
        sync = tokens_per_second(r, best_flight(r, 0.8, 1), 0.8)
        gains.append(tokens_per_second(r, best_flight(r, 0.8, 2), 0.8) / sync)
    assert gains[0] > 1.05
    assert all(gain > 1.05 for gain in gains)


def test_the_coordinator_hears_between_two_things_it_does() -> None:
    r = RowCosts.through([{1: 1.0}, {1: 1.5}], draft=0.25, link=0.0)
    # Block 0: drafted to 0.25, own layers to 1.25, verdict at 2.75; block 1 is in its own layers from 1.5 to 2.5,
    # block 2 is being drafted from 2.75, when the verdict has come.
    assert next(resumed(r, Flight(1, 1, 2))) == pytest.approx(2.75)
    slow = RowCosts.through([{1: 2.0}, {1: 0.5}], draft=0.25, link=0.0)
    # Verdict of block 0 at 2.75, in the middle of block 1's own layers, which end at 4.5.
    assert next(resumed(slow, Flight(1, 1, 2))) == pytest.approx(4.5)


def test_a_table_and_not_a_line() -> None:
    table = RowCosts.through([{1: 1.0, 3: 3.0, 4: 2.0}], 0.1, 0.0)
    assert [table.at(0, n) for n in (1, 2, 3, 4, 9)] == [1.0, 2.0, 3.0, 2.0, 2.0]


def test_what_cannot_be_is_refused() -> None:
    for wrong in ((-1, 0, 1), (0, -1, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="cannot be"):
            Flight(*wrong)


def test_a_block_that_is_drafted_at_once_costs_a_round_and_is_no_longer_than_it_can_be() -> None:
    """A round of 4 ms before steps of 20: one after the other few drafts pay, at once as many as there can be."""
    each = RowCosts(((0.0, *(0.020,) * 16),), (0.0, 0.004), at_end=True)
    whole = replace(each, at_once=7)
    assert [each.drafting(0), each.drafting(5), whole.drafting(0), whole.drafting(5)] == [0, 0.02, 0, 0.004]
    assert best_flight(whole, 0.8, 1).first == 7
    assert best_flight(each, 0.8, 1).first < 7
    assert tokens_per_second(whole, Flight(7), 0.8) > 1.2 * tokens_per_second(each, best_flight(each, 0.8, 1), 0.8)
