"""The step that follows if a result is as expected. That it is what the scheduler plans is asserted in every history of
the toy (``House.step``); here is when there is one."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.plan import SampledSlice, SampledToken, StageFigures, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler import invariants
from splitinfer.core.scheduler.scheduler import _MOST_UNLEARNED, Scheduler
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.group_controller import GroupController
from splitinfer.core.speculation.grouping import Grouping, Member
from tests.core.scheduler.test_scheduler import some_knobs as some_rules
from tests.core.toy import VOCAB, House, ToyDisk, blocks, next_token, small


@pytest.mark.parametrize(("count", "steps"), [(1, 39), (2, 78), (4, 78)])
def test_decodes_are_expected(count: int, steps: int):
    """But for a sequence's first and last tokens."""
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


def test_groups_are_chosen_when_there_is_time_for_it():
    """Not between a result and the step that follows."""
    house = House(max_running=4, token_budget=64)
    house.learns = False
    for i in range(4):
        house.add([1, 2, i], max_tokens=60, seed=i)
    controller, members = house.scheduler.state.groups, list[frozenset[int]]()
    choose = controller.choose

    def noted(asked: dict[int, Member], *more: object, **named: object) -> None:
        members.append(frozenset(asked))
        choose(asked, *more, **named)

    with patch.object(GroupController, "choose", lambda _, *more, **named: noted(*more, **named)):
        for number in range(30):
            if number == 16:
                house.scheduler.learn()
                members.clear()
            while house.step() is not None:
                pass
            house.deliver()
        assert house.num_expected > 20
        assert not members
        house.scheduler.learn()
        assert members == [frozenset(range(4))]
        house.scheduler.learn()
        assert len(members) == 1, "nothing was learned since"


class _Rules:
    """A grammar that admits all, and now and then forces what the toy says next."""

    failure = None

    def __init__(self, house: House, seq_id: int) -> None:
        self._house, self._seq_id = house, seq_id

    def forced(self, answer: Seq[int], count: int) -> list[int]:
        tokens = [*self._house.prompts[self._seq_id], *answer]
        return [next_token(tokens, self._house.sequences[self._seq_id].seed)] if len(tokens) % 3 == 0 and count else []

    def admitted(self, answer: Seq[int], tokens: Seq[int]) -> list[bool]:
        return [False] * len(tokens)


class _AnyGroups(GroupController):
    """Chooses where that is due, and then any number of groups."""

    pick: Random

    def _best(self, costs: RowCosts, members: list[Member], objective: float | None) -> Grouping:
        return replace(super()._best(costs, members, objective), groups=self.pick.randint(1, self.most_groups))


class GoesOn:
    """A history as the loop has it, mostly decodes: the next step follows on a result at once, and all else happens
    before the loop waits for the next. ``goes_on``: whether what is expected is launched first."""

    def __init__(self, pick: Random, *, goes_on: bool) -> None:
        self.pick, self.goes_on, self.plans = pick, goes_on, list[StepPlan]()
        self.house = House(
            disks=[ToyDisk() for _ in range(pick.choice([0, 0, 1, 3]))],
            num_groups=pick.randint(1, 4),
            max_in_flight=pick.randint(1, 5),
            token_budget=pick.choice([2, 5, 50, 50]),
            max_running=pick.randint(1, 6),
            max_len=pick.choice([14, 1000, 1000]),
            whole_blocks=(states := pick.random() < 0.2),
            keeps_blocks=pick.random() < 0.5,
            kv=pick.choice([None, None, blocks(20), blocks(8), blocks(30, 6)]),
            forces=pick.random() < 0.5,
            rewind=0 if states else None,
            fixed_groups=pick.random() < 0.3,
            policy_config=some_rules(pick),
        )
        self.house.learns = False
        state = self.house.scheduler.state
        state.groups = _AnyGroups(state.costs, state.groups.most_groups, state.groups.fixed)
        state.groups.pick = pick

    def submit(self) -> None:
        prompt = [self.pick.randrange(VOCAB) for _ in range(self.pick.randint(1, 6))]
        deadline = self.pick.choice([None, None, self.house.now + 90 * self.pick.random()])
        end_tokens = self.pick.choice([(), (), (), (self.pick.randrange(VOCAB),)])
        with suppress(NeverFits):
            seq_id = self.house.add(
                prompt, self.pick.choice([2, 20, 60]), self.pick.choice([None, "a"]), end_tokens,
                self.pick.randrange(3), priority=self.pick.choice([0, 0, 1]), deadline=deadline,
            )  # fmt: skip
            seq = self.house.sequences[seq_id]
            seq.params = replace(seq.params, stop=self.pick.choice([(), (), (), (), ("end",)]))
            if self.house.scheduler.config.forces and self.pick.random() < 0.1:
                seq.rules = _Rules(self.house, seq_id)

    def end(self) -> None:
        live = sorted(set(self.house.sequences) - set(self.house.reasons))
        if live:
            self.house.finish(self.pick.choice(live))

    def tune(self) -> None:
        """To no less, as steps under way and sequences that run have it already."""
        config = self.house.scheduler.config
        most, running = max(config.token_budget, self.pick.choice([2, 5, 50])), self.pick.randint(config.max_running, 6)
        self.house.scheduler.tune(some_rules(self.pick), most, running)

    def other_groups(self) -> None:
        self.house.scheduler.fix_groups(self.pick.choice([None, 1, 2]))

    def forget_session(self) -> None:
        self.house.scheduler.prefix_cache.forget("a")

    def disks_catch_up(self) -> None:
        for disk in self.house.disks:
            disk.catch_up(self.pick.randint(0, 2))

    def run(self, num_events: int) -> None:
        events = {
            self.submit: 6, self.end: 1, self.tune: 1, self.other_groups: 1, self.forget_session: 1,
            self.disks_catch_up: 2, self.house.scheduler.learn: 9, self.result: 99,
        }  # fmt: skip
        for event in self.pick.choices(list(events), list(events.values()), k=num_events):
            event()
            self.turns()
        while self.house.toy.under_way:
            self.result()
            self.turns()
        self.house.check_answers()
        self.house.check_kv()

    def result(self) -> None:
        if not self.house.toy.under_way:
            return
        if len(self.house.scheduler._unlearned) == _MOST_UNLEARNED:  # with one more, a plan not expected learns first
            self.house.scheduler.learn()
        result = self.house.toy.under_way[0]
        rows = self.house.scheduler.oldest.plan.num_tokens
        figures = result.figures or [StageFigures(i, 0.0, 0.0) for i in range(self.house.scheduler.config.num_groups)]
        timed = (replace(one, ended=0.1 + 0.01 * rows, rows=rows) for one in figures)
        self.house.toy.under_way[0] = replace(result, figures=tuple(timed))
        self.house.deliver()
        is_expected = self.house.begun is not None
        if not self.goes_on:
            self.house.begun = None
        if is_expected:
            self.turn()

    def turns(self) -> None:
        self.house.expire(self.house.now)
        while self.turn():
            pass

    def turn(self) -> bool:
        plan = self.house.step()
        self.plans += [] if plan is None else [plan]
        invariants.check(self.house.scheduler)
        return plan is not None


@settings(suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([3, 9, 40]))
def test_any_history_has_the_plans_that_it_has_without(seed: int, block: int):
    """What is launched as expected is what is planned then (``House.step``), and nothing else differs either."""
    with small(block=block):
        histories = [GoesOn(Random(seed), goes_on=goes_on) for goes_on in (True, False)]
        for history in histories:
            history.run(120)
        assert histories[0].plans == histories[1].plans
        assert histories[0].house.generated == histories[1].house.generated
