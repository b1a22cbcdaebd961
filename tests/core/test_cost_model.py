"""What steps cost, learned from steps: what was measured is known, what was not is guessed with care."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from threading import Event

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitinfer.core.costs.model import CostModel, most_rows, quickest_size
from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import EXACT, StageCosts
from splitinfer.core.plan import Slice, StageFigures
from tests.core.given_costs import GivenCosts, line


def machine(shape: Shape) -> float:
    """Flat to 8 rows, then 1 ms a row; attention by what it looks at."""
    rows = 0.03 + 0.0002 * min(shape.rows, 8) + 0.001 * max(0, shape.rows - 8)
    return rows + 2e-6 * shape.decode_context + 4e-8 * shape.chunk_context


def some_shape(pick: Random) -> Shape:
    shape = Shape()
    for _ in range(pick.randint(0, 12)):
        shape = shape.plus(pick.randrange(2000), 1)
    return shape.plus(pick.randrange(4000), pick.choice([2, 17, 40, 100, 128])) if pick.random() < 0.6 else shape


def trained(seed: int, noise: float, steps: int = 300, drift: float = 1.0) -> StageCosts:
    pick, costs = Random(seed), StageCosts()
    for step in range(steps):
        shape = some_shape(pick)
        costs.took(shape, machine(shape) * drift ** (step / steps) * (1 + noise * pick.gauss(0, 1)))
    return costs


@pytest.mark.parametrize("seed", range(4))
def test_what_it_has_seen_it_knows(seed: int):
    costs, pick = trained(seed, noise=0.0), Random(seed + 100)
    for _ in range(100):
        shape = some_shape(pick)
        if shape.rows:
            assert costs.at(shape) == pytest.approx(machine(shape), rel=0.08)


def test_noise_averages_out_and_is_told_by_the_margin():
    quiet, noisy = trained(1, noise=0.01), trained(1, noise=0.1)
    shape = Shape(4, 4 * 501).plus(1000, 100)
    assert noisy.at(shape) == pytest.approx(machine(shape), rel=0.1)
    assert quiet.margin < 1.06 < 1.12 < noisy.margin < 1.4


def test_it_follows_a_machine_that_slows_down():
    shape = Shape(4, 4 * 501).plus(1000, 100)
    assert trained(2, noise=0.03, drift=1.6).at(shape) == pytest.approx(1.6 * machine(shape), rel=0.12)


def test_a_hiccup_is_forgotten():
    costs, shape = trained(3, noise=0.02), Shape().plus(0, 64)
    before = costs.at(shape)
    costs.took(shape, 50 * machine(shape))
    assert costs.at(shape) < 1.1 * before


@given(seed=st.integers(0, 2**32))
@example(seed=10539)  # the last bit of a figure between two places
def test_more_work_never_costs_less(seed: int):
    pick, costs = Random(seed), StageCosts()
    for _ in range(pick.randint(1, 60)):
        costs.took(some_shape(pick), pick.random() + 1e-3)
    times = [costs.at(Shape().plus(100, rows)) for rows in range(EXACT + 1, 2000, 37)]  # fewer: kernels have steps
    assert all(a <= b for a, b in pairwise(times))
    assert times[0] >= 0


KERNELS = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.15, 6: 1.4, 8: 1.35, 12: 1.6, 16: 1.7, 64: 5.0}


def test_sizes_that_kernels_suit_better_are_averaged_with_those_before() -> None:
    dice, costs = Random(3), StageCosts()
    for _ in range(3000):
        rows = dice.choice(list(KERNELS))
        costs.took(Shape(rows), dice.choice([0.9, 1.0, 1.1]) * KERNELS[rows])
    found = {n: costs.at(Shape(n)) for n in KERNELS}
    assert found == pytest.approx({**KERNELS, 3: 1.225, 4: 1.225, 6: 1.375, 8: 1.375}, rel=0.06)


@given(held_up=st.floats(2.0, 1e4), at=st.integers(0, 1))
def test_a_size_whose_first_steps_are_held_up_makes_no_other_look_fast(held_up: float, at: int) -> None:
    costs = StageCosts()
    for _ in range(50):
        costs.took(Shape(1), 1.0)
    for number in range(100):
        costs.took(Shape(8), 1.5 * (held_up if number == at else 1.0))
    assert costs.at(Shape(1)) == pytest.approx(1.0, rel=0.1)
    assert costs.at(Shape(8)) == pytest.approx(1.5, rel=0.1)


def test_one_size_says_nothing_of_rows() -> None:
    costs = StageCosts()
    costs.took(Shape(8), 1.0)
    assert 0.9 < costs.at(Shape(1)) <= 1.0 <= costs.at(Shape(16)) < 1.1


def test_sizes_never_seen_go_on_as_the_last_one():
    costs = StageCosts()
    for rows in (8, 16, 32, 64) * 10:
        costs.took(Shape(rows), 0.01 + 0.001 * rows)
    assert costs.at(Shape(512)) == pytest.approx(0.522, rel=0.1)
    assert costs.trusted_rows == 128


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_ignored(seconds: float):
    costs = StageCosts()
    costs.took(Shape(4), seconds)
    assert costs.num_seen == 0


def test_it_can_be_read_while_it_learns():
    """By the threads that answer for figures."""
    costs, pick, ends = StageCosts(), Random(1), Event()

    def read() -> None:
        while not ends.is_set():
            costs.as_dict(), costs.measured, costs.margin, costs.at(Shape(9))

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for _ in range(3000):
            costs.took(Shape(pick.randrange(1, 4000)), pick.random())
        ends.set()
    assert reading.exception() is None


def figures(stage: int, received: float, started: float, ended: float, rows: int) -> StageFigures:
    return StageFigures(stage, started, ended, received, rows=rows)


def test_a_step_teaches_all_stages_and_the_hop():
    model, slices = CostModel.of(2), (Slice(1, 5, (7,), 1), Slice(2, 0, (1, 2, 3), 0))
    for _ in range(10):
        # The second stage's clock is another one; there the step waited 2 s for its turn.
        model.learn(slices, [figures(0, 0.0, 1.0, 1.5, 4), figures(1, 90.0, 92.0, 92.25, 4)], returned_at=3.95)
    shape = Shape.of(slices)
    assert model.stages[0].at(shape) == pytest.approx(0.5, rel=1e-3)
    assert model.stages[1].at(shape) == pytest.approx(0.25, rel=1e-3)
    assert model.hop == pytest.approx(0.1)


def test_a_step_of_which_a_part_was_not_computed_teaches_nothing():
    model, slices = CostModel.of(2), (Slice(1, 5, (7, 8), 1),)
    model.learn(slices, [figures(0, 0.0, 1.0, 1.5, 2), figures(1, 0.0, 2.0, 2.25, 0)], returned_at=3.0)
    assert [stage.num_seen for stage in model.stages] == [1, 0]


@pytest.mark.parametrize("num_decoding", [1, 4, 16, 21])
@pytest.mark.parametrize(("seconds", "like"), [(0.3, 16), (0.12, 4)])
def test_as_many_rows_as_the_objective_lets_through(num_decoding: int, seconds: float, like: int):
    model = CostModel([line(0.01, 0.001), line(0.005, 0.001)])
    decodes = Shape(num_decoding, 101 * num_decoding)
    found = most_rows(model, decodes, 0, 2048, 2, seconds)
    assert (num_decoding + found) % like == 0
    assert model.cycle(decodes.plus(0, found), 2) <= seconds < model.cycle(decodes.plus(0, found + like), 2)
    assert most_rows(model, decodes, 0, 2048, 2, 1e-9) == 4 - num_decoding % 4, "never nothing"
    assert most_rows(model, decodes, 0, 3, 2, 10.0) == 3, "never more than there is"


def test_of_a_machine_it_does_not_know_it_asks_little():
    assert most_rows(CostModel.of(2), Shape(4, 40), 0, 512, 2, 1.0) == 16


def test_copying_stored_kv_is_no_cost_of_a_steps_rows():
    model, part = CostModel.of(1), Slice(1, 0, (0,), 1)
    for step in range(20):
        model.learn([part], [StageFigures(0, step, step + 0.5, copying=0.3, rows=1)], returned_at=step + 0.5)
    assert model.stages[0].at(Shape.of([part])) == pytest.approx(0.2, rel=0.01)


def test_a_link_is_what_a_step_takes_beyond_computing() -> None:
    model, part = CostModel.of(2), Slice(1, 0, (0,), 1)
    for beyond in (6.0, 6.0, -5.0, 6.0):  # clocks are not perfect
        model.learn([part], [figures(0, 0.0, 0.0, 1.0, 1), figures(1, 10.0, 10.0, 11.0, 1)], returned_at=2.0 + beyond)
    assert model.hop == 3.0


def test_a_host_that_is_held_up_now_and_then_counts_as_it_usually_is() -> None:
    model, part = CostModel.of(1), Slice(1, 0, (0,), 1)
    for since in (9.9, 9.9, 2.0, 9.9, 11.0):
        model.learn([part], [figures(0, 0.0, 10.0, 12.0, 1)], returned_at=12.0, since=since)
    assert model.host == pytest.approx(0.1)


def stages(base: float, per_row: float, chunk: float = 0.0) -> CostModel:
    return GivenCosts([line(base, per_row, chunk=chunk)] * 2)


def test_a_prompt_goes_in_the_sizes_that_end_first() -> None:
    """Where a step costs what its rows do, more steps fill the second stage sooner; where it costs what the weights do,
    one step for all is right. Behind a long context rows cost, whatever they do at its beginning."""
    assert quickest_size(stages(0.0, 0.001), 0, 33, 128, 33) == 11
    assert quickest_size(stages(0.03, 0.00001), 0, 100, 128, 50) == 100
    attending = stages(0.007, 0.0, chunk=6e-8)
    assert quickest_size(attending, 0, 33, 128, 33) == 33
    assert quickest_size(attending, 12_000, 33, 128, 33) == 17


def test_a_prompts_sizes_stay_where_nothing_is_known_or_little_gained() -> None:
    assert quickest_size(CostModel.of(2), 0, 33, 128, 33) == 33
    model = stages(0.01, 0.001)
    assert quickest_size(model, 0, 20_000, 128, 128) == 128, "157 steps: the second stage waits for one of them"
    alike = [stages(base, 0.001) for base in (0.0308, 0.0312)]  # five steps and six take equally long between them
    assert {quickest_size(model, 0, 1000, 500, 500) for model in alike} == {200}


@given(st.floats(0, 0.1), st.floats(0, 0.01), st.integers(1, 3000), st.integers(8, 512), st.integers(0, 30_000))
def test_no_choice_of_sizes_is_slower(base: float, per_row: float, count: int, most: int, start: int) -> None:
    model, usual = stages(base, per_row, chunk=1e-8), min(count, most)
    found = quickest_size(model, start, count, most, usual)
    assert 1 <= found <= most
    here, before = (model.reading(start, count, size) for size in (found, usual))
    assert here is not None and before is not None and here <= before  # noqa: PT018
