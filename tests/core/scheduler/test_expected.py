"""The step that follows if a result is as expected. That it is what the scheduler plans is asserted in every history of
the toy (``House.step``); here is when there is one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from splitinfer.core.plan import SampledSlice, SampledToken, StageFigures, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence
from tests.core.toy import House


@pytest.mark.parametrize(("count", "steps"), [(1, 39), (2, 74), (4, 74)])
def test_decodes_are_expected(count: int, steps: int):
    """But for a sequence's first and last tokens, and, with several in a group, where the groups are chosen again."""
    house = House(max_running=count, token_budget=64)
    for i in range(count):
        house.add([1, 2, i], max_tokens=41, seed=i)
    house.run()
    house.check_answers()
    assert house.num_expected >= steps


def decoding(**bounds: int | bool) -> House:
    """A sequence whose second step is on its way."""
    house = House(token_budget=64, **bounds)
    house.add([1, 2, 3], max_tokens=9, end_tokens=[99])
    house.step()
    house.deliver()
    house.step()
    return house


def result_of(house: House, **changes: object) -> StepResult:
    token = SampledSlice(0, (SampledToken(4),))
    return StepResult(1, (replace(token, **changes),))


def test_a_result_as_expected_gives_its_token():
    house = decoding()
    expected = house.scheduler.expected()
    assert expected is not None
    plan = expected.filled(result_of(house))
    assert plan is not None
    assert (plan.step, plan.slices[0].start, plan.slices[0].token_ids) == (2, 4, (4,))


@pytest.mark.parametrize(
    "result",
    [
        lambda: StepResult(0, (SampledSlice(0, (SampledToken(4),)),)),
        lambda: StepResult(1),
        lambda: StepResult(1, (SampledSlice(7, (SampledToken(4),)),)),
        lambda: StepResult(1, (SampledSlice(0, (SampledToken(99),)),)),
        lambda: StepResult(1, (SampledSlice(0, ()),)),
        lambda: StepResult(1, (SampledSlice(0, (SampledToken(4),), drafts=(1,)),)),
        lambda: StepResult(1, (SampledSlice(0, (SampledToken(4),)),), (StageFigures(0, 0, 0, written=(b"k",)),)),
    ],
    ids=["another step", "nothing", "another sequence", "its end", "no token", "drafts", "a file was written"],
)
def test_another_result_is_not_expected(result: Callable[[], StepResult]):
    expected = decoding().scheduler.expected()
    assert expected is not None
    assert expected.filled(result()) is None


def a_request(scheduler: Scheduler) -> None:
    scheduler.add(Sequence(5, [1], SamplingParams(), 0))


@pytest.mark.parametrize(
    "event",
    [
        a_request,
        lambda scheduler: scheduler.state.freed.append(7),
        lambda scheduler: setattr(scheduler.running[0], "params", SamplingParams(max_tokens=9, stop=("end",))),
        lambda scheduler: setattr(scheduler.running[0], "params", SamplingParams(max_tokens=2)),
    ],
    ids=["a request waits", "KV is to be freed", "stop strings", "its last token"],
)
def test_nothing_is_expected_where_more_could_be_planned(event: Callable[[Scheduler], None]):
    house = decoding()
    event(house.scheduler)
    assert house.scheduler.expected() is None


def test_nothing_is_expected_of_a_prompt_or_with_a_drafter():
    house = House(token_budget=64)
    house.add([1, 2, 3])
    house.step()
    assert house.scheduler.expected() is None
    assert decoding(speculates=True).scheduler.expected() is None
