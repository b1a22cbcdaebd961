"""The scheduler against the toy: any history, in any order, then one thing at a time."""

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import VOCAB, Guesser, House, ToyDisk, blocks, drain, kept_by_all, next_token, small

from splitinfer.core.kv.budget import KVBudget, NeverFits, StageKV
from splitinfer.core.plan import SampledSlice, SampledToken, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler import scheduler
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.flight import Flight
from splitinfer.core.speculation.speculation import Draft
from splitinfer.errors import QueueFull
from tests.core import invariants


def some_knobs(pick: Random) -> PolicyConfig:
    return PolicyConfig(
        policy=pick.choice([PolicyName.STALL_FREE, *PolicyName]),
        prefill_share=pick.choice([1.0, 1.0, 0.5, 0.01]),
        itl_slo=pick.choice([None, None, 1e-6, 3.0]),
        max_partial_prefills=pick.choice([1, 1, 2, 5]),
        max_decode_gap=pick.choice([None, 1.0, 10.0]),
        kv_high=0.6,
        kv_low=pick.choice([0.0, 0.3]),
        min_dwell=pick.randint(1, 6),
    )


class AnyOrder:
    """One made-up history: submissions, turns, steps, results, endings, in the order that ``pick`` gives."""

    def __init__(self, pick: Random) -> None:
        self.random = pick
        self.house = House(
            disks=[ToyDisk() for _ in range(pick.choice([0, 1, 2, 3]))],
            num_groups=pick.randint(1, 4),
            max_in_flight=pick.randint(1, 5),
            token_budget=pick.choice([1, 2, 3, 5, 9, 50]),
            max_running=pick.randint(1, 6),
            max_len=pick.choice([12, 1000, 1000]),
            whole_blocks=(states := pick.random() < 0.3),
            keeps_blocks=pick.random() < 0.9,
            prompts_only=pick.random() < 0.3,
            max_sessions=pick.randint(1, 3),
            max_waiting=pick.choice([2, 1000]),
            kv=pick.choice([None, None, blocks(20), blocks(8), blocks(30, 6), blocks(5), blocks(20, stored=4)]),
            speculates=(speculates := pick.random() < 0.5),
            rewind=0 if states else pick.choice([None, None, 3, 9]),
            policy_config=some_knobs(pick),
        )
        if speculates:
            self.house.guess = Guesser(pick, pick.choice([0.0, 0.5, 0.9, 1.0]))
            self.house.overtake = lambda: pick.random() < 0.3
        self.now = 0.0
        self.sessions = [None, "a", "b", "c"][: pick.randint(1, 4)]

    def run(self, num_events: int) -> None:
        events = {
            self.submit: 4, self.next_turn: 4, self.house.step: 12, self.result: 8, self.end: 2,
            self.house.run: 1, self.forget_session: 1,
            self.time_passes: 1, self.stages_forget: 1, self.disks_catch_up: 4, self.a_file_goes: 1,
        }  # fmt: skip
        for event in self.random.choices(list(events), list(events.values()), k=num_events):
            event()
            invariants.check(self.house.scheduler)
        self.house.check()

    def flight(self) -> Flight | None:
        first, further = self.random.randint(0, 5), self.random.randint(0, 5)
        return Flight(first, further, self.random.randint(1, 4)) if self.house.guess else None

    def tokens(self, at_least: int, at_most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randint(at_least, at_most))]

    def add(self, prompt: list[int], session: str | None) -> None:
        end_tokens = self.random.choice([(), (), (self.random.randrange(VOCAB),)])
        max_tokens = self.random.choice([1, 1, 2, 6, 15])
        deadline = self.random.choice([None, None, self.now + self.random.random() * 10])
        try:
            self.house.add(
                prompt, max_tokens, session, end_tokens, self.random.randrange(3),
                priority=self.random.choice([0, 0, 0, 1, -1]), deadline=deadline, flight=self.flight(),
            )  # fmt: skip
        except QueueFull:
            assert len(self.house.scheduler.waiting) >= self.house.scheduler.config.max_waiting
        except NeverFits:
            assert self.house.scheduler.config.kv is not None

    def submit(self) -> None:
        self.add(self.tokens(1, 14), self.random.choice(self.sessions))

    def next_turn(self) -> None:
        """A turn that repeats what somebody had, up to where it was edited."""
        if self.house.sequences:
            before = self.random.choice(list(self.house.sequences.values())).tokens
            kept = len(before) - min(self.random.randint(0, 6), len(before) - 1)
            self.add(before[:kept] + self.tokens(0, 4), self.random.choice(self.sessions))

    def result(self) -> None:
        if self.house.toy.under_way:
            self.house.deliver()

    def end(self) -> None:
        live = set(self.house.sequences) - set(self.house.reasons)
        candidates = sorted(live) if live and self.random.random() < 0.9 else list(self.house.sequences)
        if candidates:
            self.house.finish(self.random.choice(candidates), self.random.choice(list(FinishReason)))

    def time_passes(self) -> None:
        self.now += self.random.random() * 2
        ended = self.house.expire(self.now)
        late = {i for i, seq in self.house.sequences.items() if seq.deadline is not None and seq.deadline <= self.now}
        assert set(ended) <= late <= set(self.house.reasons)

    def stages_forget(self) -> None:
        for disk in self.house.disks:  # what was not written yet is lost, or was just written and never told of
            if self.random.random() < 0.5:
                disk.catch_up()
            disk.behind.clear()
            disk.told()
        self.house.scheduler.requeue_all(kept_by_all(self.house.disks))
        self.house.toy.forget()
        self.house.was_lost = True

    def disks_catch_up(self) -> None:
        for disk in self.house.disks:
            disk.catch_up(self.random.randint(0, 4))

    def a_file_goes(self) -> None:
        """On one side only: evicted there, damaged, deleted."""
        if self.house.disks:
            files = self.random.choice(self.house.disks).files
            for key in self.random.sample(sorted(files), min(len(files), self.random.choice([1, 1, 100]))):
                del files[key]

    def forget_session(self) -> None:
        self.house.scheduler.prefix_cache.forget(self.random.choice("abc"))


@settings(suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 3))
def test_any_order(random: Random, block: int, min_chunk: int):
    with small(block=block, min_chunk=min_chunk):
        AnyOrder(random).run(80)


# -- one thing at a time ---------------------------------------------------------------------------


def test_chunks_of_a_prompt_do_not_wait_for_each_other():
    house = House(max_in_flight=3, token_budget=4)
    house.add([1] * 10)
    plans = [house.step() for _ in range(4)]
    assert [(p.slices[0].start, p.slices[0].end, p.slices[0].num_logits) for p in plans[:3]] == [
        (0, 4, 0),
        (4, 8, 0),
        (8, 10, 1),
    ]
    assert plans[3] is None, "max_in_flight is 3"
    assert [len(p.new) for p in plans[:3]] == [1, 0, 0]
    house.deliver()
    assert house.step() is None, "decode waits for its token"
    house.deliver()
    assert house.deliver()[0].token.token_id == next_token([1] * 10, 0)
    assert house.step().slices[0].start == 10


def test_a_sequence_in_decode_does_not_starve_behind_a_long_prompt():
    house = House(max_in_flight=1, token_budget=4, max_running=2)
    house.add([1] * 3, max_tokens=5)
    house.add([2] * 40, max_tokens=1)
    order = [part.seq_id for part in drain(house)]
    # A step of its group, with a chunk beside it, and a step of the empty group, with a chunk alone.
    assert order[:13] == [0] + [0, 1, 1] * 4


def test_what_ends_an_answer_is_not_in_a_plan():
    """A plan has a bound, beyond which a stage takes it for damaged, and stop strings are a client's."""
    house = House()
    seq = Sequence(1, [1, 2], SamplingParams(max_tokens=1, stop=("end",), stop_token_ids=(9,)), seed=0)
    house.scheduler.add(seq)
    plan = house.scheduler.schedule(0.0)
    assert plan is not None
    assert [new.params for new in plan.new] == [SamplingParams(max_tokens=1)]
    assert seq.params.stop == ("end",)


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(1, (SampledSlice(0, (SampledToken(1),)),)),
        StepResult(0),
        StepResult(0, (SampledSlice(1, (SampledToken(1),)),)),
        StepResult(0, (SampledSlice(0, (SampledToken(1), SampledToken(2))),)),
        StepResult(0, (SampledSlice(0, (SampledToken(1),)), SampledSlice(1, (SampledToken(1),)))),
    ],
)
def test_an_answer_to_another_question_is_refused(answer: StepResult):
    house = House()
    with pytest.raises(ValueError, match=f"step {answer.step}"):
        house.scheduler.update(answer)
    house.add([1, 2])
    house.step()
    with pytest.raises(ValueError, match="step"):
        house.scheduler.update(answer)
    assert len(house.scheduler.in_flight) == 1, "the plan is still under way"
    house.check()


@pytest.mark.parametrize(
    "name", ["num_groups", "max_in_flight", "token_budget", "max_running", "max_len", "max_waiting"]
)
def test_bounds_are_at_least_one(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        House(**{name: 0})


def test_idle_minutes_are_not_the_coordinators_work():
    """Between two requests nobody waits for it; the second is planned as soon as it comes."""
    house = House()
    house.add([5], max_tokens=2)
    house.run()
    house.now += 600.0
    house.add([6], max_tokens=2)
    assert house.scheduler.schedule(house.now) is not None
    since = house.scheduler.in_flight[-1].idle_since
    assert since is None or since >= house.now


def calls_of_a_plan(num_waiting: int) -> int:
    house = House(max_running=8, token_budget=64, max_waiting=10_000)
    for i in range(8 + num_waiting):
        house.add([i % VOCAB] * 3, max_tokens=100)
    house.until(lambda: len(house.scheduler.batches) == 8 and not house.toy.under_way)
    count = 0

    def called(_frame: object, event: str, _what: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # else a collection may call what watches collections, as hypothesis does
    sys.setprofile(called)
    try:
        assert house.scheduler.schedule(house.now) is not None
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_who_waits_costs_a_plan_nothing():
    assert calls_of_a_plan(2000) == calls_of_a_plan(10) < 400


class Watched(list[int]):
    """Tokens that count how many of them are copied."""

    num_copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_copied += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_copied += len(self)
        return super().__iter__()


def test_a_token_of_a_long_context_copies_none_of_it():
    """With a form, drafts and jumps: only the answer is gone through, and a block that is stored."""
    house = House(token_budget=5000, max_len=6000, speculates=True)
    house.guess = lambda proposal: [Draft(1)] * proposal.count
    seq = house.sequences[house.add([*range(5)] * 1000, max_tokens=40)]
    seq.rules = Options()  # type: ignore[assignment]
    watched = seq.tokens = Watched(seq.tokens)
    house.until(lambda: seq.num_generated >= 3)
    watched.num_copied, before = 0, seq.num_generated
    drain(house)
    assert watched.num_copied < (before - seq.num_generated) * -100 < len(seq.tokens)


class Options:
    """Rules by which an answer goes on, behind its first token, with the likeliest of some texts."""

    failure = None

    def __init__(self, *texts: tuple[int, ...]) -> None:
        self.texts, self.decided = texts, tuple[int, ...]()

    def alternatives(self, answer: list[int]) -> tuple[tuple[int, ...], ...]:
        return self.texts if len(answer) == 1 and not self.decided else ()

    def jump_forward(self, _answer: list[int], _most: int) -> tuple[int, ...]:
        return ()

    def admitted(self, _answer: list[int], drafts: list[int]) -> list[bool]:
        return [False] * len(drafts)

    def decide(self, _answer: list[int], tokens: tuple[int, ...]) -> None:
        self.decided = tokens


def answered(plan: StepPlan) -> StepResult:
    """Each token is a 1, and the scored ones have the log probability of their id."""
    found = list[SampledSlice]()
    for part in plan.slices:
        scored = tuple(SampledToken(token, -float(token)) for token in part.scored)
        if scored or part.num_logits:
            found.append(SampledSlice(part.seq_id, tuple([SampledToken(1)] * part.num_logits), scored=scored))
    return StepResult(plan.step, tuple(found))


@pytest.mark.parametrize(("budget", "texts", "decided"), [
    (8, [(5, 5, 5), (3, 4, 2)], (3, 4, 2)), (2, [(2, 2), (3,)], (3,)), (2, [(2, 2, 2), (4,)], (4,)),
])  # fmt: skip
def test_texts_that_are_scored_count_by_their_rows(budget: int, texts: list[tuple[int, ...]], decided: tuple[int, ...]):
    """One that has more than a step may have goes alone, as no token may depend on the budget."""
    house = House(token_budget=budget, num_groups=1, max_running=6).scheduler
    rules = [Options(*texts) for _ in range(6)]
    for seq_id, one in enumerate(rules):
        seq = Sequence(seq_id, [1], SamplingParams(max_tokens=4), 0, rules=one)  # type: ignore[arg-type]
        house.add(seq)
    while (plan := house.schedule()) is not None:
        assert plan.num_tokens <= budget or [len(part.scored) for part in plan.slices] == [3]
        house.update(answered(plan))
    assert house.is_idle
    assert [one.decided for one in rules] == [decided] * 6


def test_a_prompt_is_hashed_by_whoever_submits_it(monkeypatch: pytest.MonkeyPatch):
    """And not on the thread of all streams, but where the stages are others."""
    house, seq = House(), Sequence(1, [1] * 600, SamplingParams(max_tokens=1), 0)
    house.scheduler.key(seq)
    keys = seq.keys
    assert len(keys) == 2
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "full_keys", lambda *_: pytest.fail("hashed again"))
        house.scheduler.add(seq)
    House(root=b"other").scheduler.add(seq)
    assert set(seq.keys).isdisjoint(keys)


def test_what_was_sampled_stays_and_the_rest_is_computed_again():
    house = House(max_in_flight=3, token_budget=64, max_running=4, num_stages=2)
    for seq_id in range(3):
        house.add([1] * 9, max_tokens=20, deadline=50.0 + seq_id)
    first = house.step()
    house.deliver()
    before = {seq.seq_id: list(seq.tokens) for seq in house.scheduler.running.values()}
    house.scheduler.requeue_all()
    moved = house.scheduler.moved_to(replace(house.scheduler.config, num_groups=3, max_in_flight=4, num_stages=3))
    assert len(moved.costs.stages) == 3
    assert len(moved.waiting) == 3
    assert {seq.seq_id: list(seq.tokens) for seq in moved.waiting if seq.seq_id in before} == before
    plan = moved.schedule()
    assert plan is not None
    assert plan.step > first.step, "steps of the stages before are not taken for those of the new ones"
    assert all(part.start == 0 and len(part.token_ids) == len(before.get(part.seq_id, [1] * 9)) for part in plan.slices)
    assert moved.expire(60.0) == [0, 1, 2], "deadlines are kept"


def test_what_has_no_room_moves_nothing():
    house = House()
    house.add([1] * 9)
    house.scheduler.requeue_all()
    small = replace(house.scheduler.config, kv=KVBudget((StageKV(10**6, 1), StageKV(10, 1))))
    with pytest.raises(NeverFits):
        house.scheduler.moved_to(small)
    assert len(house.scheduler.waiting) == 1
    assert house.step() is not None
