"""When there is room in the queue again, as far as steps and answers so far can tell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.costs.model import CostModel
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.retry_after import LEAST, MOST, UsualRequest, seconds_until_room
from splitinfer.core.sequence import Sequence
from tests.core.given_costs import GivenCosts, line

CONFIG = SchedulerConfig(num_groups=2, max_in_flight=3, token_budget=100, max_running=8, max_len=4000)
COSTS = GivenCosts([line(0.1, 0.0), line(0.2, 0.0)])
CYCLE = 2 * 0.2 * 1.02  # two groups, the slower stage, and the least margin
TELLING = UsualRequest(answer=40, prompt=0)


def sequence(max_tokens: int, generated: int = 0) -> Sequence:
    made = Sequence(1, [0] * 10, SamplingParams(max_tokens=max_tokens), seed=1)
    made.tokens += [0] * generated
    return made


def seconds(*running: Sequence, usual: UsualRequest = TELLING, nth: int = 1) -> float:
    return seconds_until_room(running, CONFIG, COSTS, usual, nth)


MANY, FEW = [sequence(4000)] * 8, [sequence(4000)] * 4


@pytest.mark.parametrize(
    ("running", "usual", "expected"),
    [
        (FEW, TELLING, CYCLE * 40 / 4),  # answers end as answers have ended so far
        (MANY, TELLING, CYCLE * 40 / 8),
        ([sequence(30), sequence(30, generated=20)], TELLING, CYCLE / (1 / 30 + 1 / 10)),  # no later than they may last
        ([sequence(30)] * 4, UsualRequest(), CYCLE * 30 / 4),
        (FEW, UsualRequest(40, prompt=1000), CYCLE * 40 / 4 + 1000 * 0.2 / CONFIG.token_budget),  # which is read first
    ],
)
def test_what_is_foretold(running: list[Sequence], usual: UsualRequest, expected: float):
    assert seconds(*running, usual=usual) == pytest.approx(expected)


def test_each_that_is_turned_away_gets_a_place_of_its_own():
    one, three = (seconds(*MANY, nth=nth) for nth in (1, 3))
    assert three == pytest.approx(3 * one)


def test_there_is_always_an_answer():
    assert seconds() == LEAST
    assert seconds(sequence(4000), usual=UsualRequest(1e9, 1e9)) == MOST
    nothing_known = CostModel.of(2)
    assert seconds_until_room([sequence(100)], CONFIG, nothing_known, UsualRequest()) == LEAST


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 50)), max_size=8), st.floats(0, 1e4), st.integers(1, 99))
def test_it_is_within_its_bounds_and_never_sooner_for_the_next(running: list[tuple[int, int]], answer: float, nth: int):
    sequences = [sequence(most, min(generated, most)) for most, generated in running]
    found = [seconds(*sequences, usual=UsualRequest(answer, 7), nth=n) for n in (nth, nth + 1)]
    assert LEAST <= found[0] <= found[1] <= MOST
