"""The scheduler against a toy pipeline whose answers depend on every token of KV it was told to keep.

The toy's KV of a sequence is simply the list of tokens that the plans put there, and its next token is a
number made of that whole list and the seed. A slice that starts at the wrong place, a rollback that was
forgotten or a takeover of the wrong parent changes every token after it. The toy also obeys like the real
stages: it refuses to open a sequence twice, to leave gaps, and to go further back than caches of its kind
can go, which is counted from the most tokens they ever held.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.scheduler import Scheduler, SchedulerConfig, TokenEvent
from splitinfer.core.sequence import FinishReason, SamplingParams, Sequence

VOCAB = 5  # few, so that different prompts often begin alike


def next_token(tokens: Iterable[int], seed: int) -> int:
    """A polynomial of all tokens: none can change, move or be missing without changing it."""
    value = seed + 1
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value // 7 % VOCAB


def alone(seq: Sequence, prompt: list[int], max_len: int) -> tuple[list[int], FinishReason]:
    """What a sequence generates with nobody else there: the definition of right."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, seq.seed))
        if tokens[-1] in seq.end_tokens:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) - len(prompt) >= seq.params.max_tokens or len(tokens) >= max_len:
            return tokens[len(prompt) :], FinishReason.LENGTH


@dataclass
class Cache:
    """One sequence on the toy."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    furthest: int = 0

    def run(self, part: Slice, rewind: int | None) -> None:
        assert part.start <= len(self.tokens), "a gap in the KV"
        assert rewind is None or part.start == len(self.tokens) or part.start >= self.furthest - rewind, "too far back"
        self.tokens[part.start :] = part.token_ids
        self.furthest = max(self.furthest, len(self.tokens))


class ToyPipeline:
    """Carries out plans in order; results wait until they are asked for."""

    def __init__(self, rewind: int | None = None) -> None:
        self.rewind = rewind
        self.caches: dict[int, Cache] = {}
        self.ever: set[int] = set()
        self.num_computed: dict[int, int] = {}
        self.under_way: deque[StepResult] = deque()
        self._next_step = 0

    def submit(self, plan: StepPlan) -> None:
        assert plan.step == self._next_step
        self._next_step += 1
        assert len(plan.freed) == len(set(plan.freed))
        for seq_id in plan.freed:
            assert seq_id in self.caches, f"freed {seq_id}, which is not here"
            del self.caches[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.ever, "opened twice"
            self.ever.add(new.seq_id)
            cache = Cache(new.seed) if new.parent is None else self.caches.pop(new.parent)
            first = next(part for part in plan.slices if part.seq_id == new.seq_id)
            assert tuple(cache.tokens[: first.start]) == new.prefix, "the KV taken over is of other tokens"
            assert first.start == len(new.prefix)
            cache.seed = new.seed
            self.caches[new.seq_id] = cache
        self.under_way.append(StepResult(plan.step, tuple(self._run(plan.slices))))

    def _run(self, slices: Iterable[Slice]) -> Iterable[SampledSlice]:
        for part in slices:
            cache = self.caches[part.seq_id]
            cache.run(part, self.rewind)
            self.num_computed[part.seq_id] = self.num_computed.get(part.seq_id, 0) + len(part.token_ids)
            if part.num_logits:
                assert part.num_logits == 1
                token = SampledToken(next_token(cache.tokens, cache.seed))
                yield SampledSlice(part.seq_id, (token,))


class House:
    """A scheduler and a toy, and the account of what each sequence got."""

    def __init__(self, **config: int | None) -> None:
        bounds = {"max_in_flight": 2, "chunk_size": 4, "max_running": 2, "max_len": 1000, "rewind": None, **config}
        self.scheduler = Scheduler(SchedulerConfig(**bounds))  # type: ignore[arg-type]
        self.toy = ToyPipeline(bounds["rewind"])
        self.sequences: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.generated: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()

    def add(
        self, prompt: list[int], max_tokens: int = 4, session: str | None = None, end_tokens: Iterable[int] = (), seed=0
    ) -> int:
        seq_id = len(self.sequences)
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence(seq_id, list(prompt), params, seed, frozenset(end_tokens), session)
        self.sequences[seq_id], self.prompts[seq_id], self.generated[seq_id] = seq, list(prompt), []
        self.scheduler.add(seq)
        return seq_id

    def step(self) -> StepPlan | None:
        could = self.scheduler.can_schedule
        plan = self.scheduler.schedule()
        assert (plan is not None) == could, "can_schedule and schedule disagree"
        if plan is not None:
            assert plan.slices or plan.freed
            assert plan.num_tokens <= self.scheduler.config.chunk_size
            self.toy.submit(plan)
        assert len(self.toy.under_way) == self.scheduler.num_in_flight <= self.scheduler.config.max_in_flight
        return plan

    def deliver(self) -> list[TokenEvent]:
        events = self.scheduler.update(self.toy.under_way.popleft())
        for event in events:
            assert event.seq_id not in self.reasons, "a token after the end"
            self.generated[event.seq_id].append(event.token.token_id)
            if event.finish_reason is not None:
                self.reasons[event.seq_id] = event.finish_reason
        return events

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        was_live = seq_id not in self.reasons
        assert self.scheduler.finish(seq_id, reason) == was_live
        if was_live:
            self.reasons[seq_id] = reason
            self.cancelled.add(seq_id)

    def run(self) -> None:
        for _ in range(10_000):
            if self.step() is None:
                if not self.toy.under_way:
                    return
                self.deliver()
            self.scheduler.check()
        raise AssertionError("it never ends")

    def tokens(self, seq_id: int) -> list[int]:
        return self.prompts[seq_id] + self.generated[seq_id]

    def check_answers(self) -> None:
        for seq_id, seq in self.sequences.items():
            tokens, reason = alone(seq, self.prompts[seq_id], self.scheduler.config.max_len)
            if seq_id in self.cancelled:
                assert self.generated[seq_id] == tokens[: len(self.generated[seq_id])]
            else:
                assert (self.generated[seq_id], self.reasons[seq_id]) == (tokens, reason)
            assert seq.finish_reason == self.reasons[seq_id]
            assert self.toy.num_computed.get(seq_id, 0) == seq.num_scheduled - seq.num_reused or not seq.is_known

    def check_kv(self) -> None:
        """Nothing is lost: what the toy still has is what sessions hold."""
        assert self.scheduler.is_idle
        assert set(self.toy.caches) == {seq.seq_id for seq in self.scheduler.held.values()}
        for seq in self.scheduler.held.values():
            assert self.toy.caches[seq.seq_id].tokens == seq.tokens[: seq.num_scheduled]


# -- anything, in any order ------------------------------------------------------------------------


class AnyOrder:
    """One made-up history: submissions, turns, steps, results, endings, in the order that ``seed`` gives."""

    def __init__(self, seed: int) -> None:
        self.random = pick = Random(seed)
        self.house = House(
            max_in_flight=pick.randint(1, 5),
            chunk_size=pick.choice([1, 2, 3, 5, 9, 50]),
            max_running=pick.randint(1, 4),
            max_len=pick.choice([12, 1000, 1000]),
            rewind=pick.choice([None, 0, 2, 5]),
            max_held=pick.randint(1, 3),
        )
        self.sessions = [None, "a", "b", "c"][: pick.randint(1, 4)]

    def run(self, num_events: int) -> None:
        events = {
            self.submit: 4, self.next_turn: 4, self.house.step: 12, self.result: 8, self.end: 2,
            self.house.run: 1, self.forget_session: 1,
        }  # fmt: skip
        for event in self.random.choices(list(events), list(events.values()), k=num_events):
            event()
            self.house.scheduler.check()
        self.house.run()
        self.house.check_answers()
        self.house.check_kv()
        for session in list(self.house.scheduler.held):
            self.house.scheduler.drop(session)
        self.house.run()
        assert not self.house.toy.caches

    def tokens(self, at_least: int, at_most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randint(at_least, at_most))]

    def add(self, prompt: list[int], session: str | None) -> None:
        end_tokens = self.random.choice([(), (), (self.random.randrange(VOCAB),)])
        max_tokens = self.random.choice([1, 1, 2, 6])
        self.house.add(prompt, max_tokens, session, end_tokens, self.random.randrange(3))

    def submit(self) -> None:
        self.add(self.tokens(1, 14), self.random.choice(self.sessions))

    def next_turn(self) -> None:
        """A turn that repeats what its session holds, up to where it was edited."""
        if self.house.scheduler.held:
            session = self.random.choice(list(self.house.scheduler.held))
            before = self.house.scheduler.held[session].tokens
            kept = len(before) - min(self.random.randint(0, 6), len(before) - 1)
            self.add(before[:kept] + self.tokens(0, 4), session)

    def result(self) -> None:
        if self.house.toy.under_way:
            self.house.deliver()

    def end(self) -> None:
        live = set(self.house.sequences) - set(self.house.reasons)
        candidates = sorted(live) if live and self.random.random() < 0.9 else list(self.house.sequences)
        if candidates:
            self.house.finish(self.random.choice(candidates), self.random.choice(list(FinishReason)))

    def forget_session(self) -> None:
        self.house.scheduler.drop(self.random.choice("abc"))


@pytest.mark.parametrize("block", range(8))
def test_any_order(block: int):
    for seed in range(block * 250, (block + 1) * 250):
        try:
            AnyOrder(seed).run(80)
        except Exception as error:
            error.add_note(f"in the history AnyOrder({seed}).run(80)")
            raise


# -- one thing at a time ---------------------------------------------------------------------------


def drain(house: House) -> list[Slice]:
    """Run to the end; every slice that was planned."""
    parts: list[Slice] = []
    while True:
        plan = house.step()
        if plan is not None:
            parts += plan.slices
        elif house.toy.under_way:
            house.deliver()
        else:
            return parts


def test_chunks_of_a_prompt_do_not_wait_for_each_other():
    house = House(max_in_flight=3, chunk_size=4)
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
    house = House(max_in_flight=1, chunk_size=4, max_running=2)
    house.add([1] * 3, max_tokens=5)
    house.add([2] * 40, max_tokens=1)
    order = [part.seq_id for part in drain(house)]
    assert order[:10] == [0, 1] * 5


def test_first_come_first_served():
    house = House(max_running=1)
    for token in range(3):
        house.add([token] * 5, max_tokens=2)
    order = [part.seq_id for part in drain(house)]
    assert order == sorted(order)


def test_the_next_turn_computes_only_what_is_new():
    house = House(chunk_size=100)
    first = house.add([1, 2, 3, 4, 1], max_tokens=4, session="s")
    house.run()
    said = house.tokens(first)
    second = house.add([*said, 2, 2], max_tokens=1, session="s")
    (part,) = drain(house)
    # The last token of the first turn was sampled and never computed: it has no KV.
    assert house.sequences[second].num_reused == len(said) - 1 == part.start
    assert part.token_ids == (said[-1], 2, 2)
    house.check_answers()


@pytest.mark.parametrize("rewind", [None, 6, 5])
def test_an_edited_turn_reuses_up_to_the_edit(rewind: int | None):
    house = House(chunk_size=100, rewind=rewind)
    first = house.add([1, 2, 3, 4, 1], max_tokens=5, session="s")
    house.run()
    said = house.tokens(first)  # ten, of which nine have KV
    edited = [*said[:3], (said[3] + 1) % VOCAB, 0, 0, 0, 0, 0, 0]
    second = house.add(edited, max_tokens=1, session="s")
    (part,) = drain(house)
    assert house.sequences[second].num_reused == part.start == (0 if rewind == 5 else 3)
    house.check_answers()
    house.check_kv()


def test_the_same_prompt_again_computes_one_token():
    house = House(chunk_size=100)
    prompt = [1, 2, 3, 4, 1]
    for _ in range(2):
        last = house.add(prompt, max_tokens=1, session="s")
        parts = drain(house)
    assert house.sequences[last].num_reused == 4
    assert [part.token_ids for part in parts] == [(1,)]


def test_going_back_twice_counts_from_the_furthest_point():
    """Caches that dropped what lies too far behind do not get it back by going back."""
    house = House(chunk_size=100, rewind=3)
    house.add([1] * 10, max_tokens=1, session="s")
    house.run()
    second = house.add([1] * 8, max_tokens=1, session="s")  # three back, one computed
    house.run()
    assert house.sequences[second].num_reused == 7
    third = house.add([1] * 6, max_tokens=1, session="s")  # three back from there: five from the furthest
    house.run()
    assert house.sequences[third].num_reused == 0
    house.check_answers()


def test_sessions_beyond_max_held_are_freed_oldest_first():
    house = House(max_held=2)
    for session in "abc":
        house.add([1, 2, 3], max_tokens=1, session=session)
    house.run()
    assert list(house.scheduler.held) == ["b", "c"]
    house.check_kv()


def test_a_request_that_failed_leaves_nothing_behind():
    house = House()
    seq_id = house.add([1] * 10, session="s")
    house.step()
    house.finish(seq_id, FinishReason.ERROR)
    house.run()
    assert not house.scheduler.held
    assert not house.toy.caches


def test_an_aborted_turn_can_be_continued():
    house = House(max_in_flight=2, chunk_size=4)
    seq_id = house.add([1] * 20, session="s")
    house.step()
    house.step()
    house.finish(seq_id)  # while two of its chunks are under way
    house.add([1] * 20, max_tokens=3, session="s")
    house.run()
    assert house.sequences[1].num_reused == 8
    house.check_answers()
    house.check_kv()


def test_the_parent_of_a_turn_that_never_began_is_freed():
    house = House(max_in_flight=5, chunk_size=1, max_running=2)
    house.add([1, 1], max_tokens=1, session="s")
    house.run()
    house.add([2] * 10)
    house.step()
    house.add([1, 1, 1], session="s")
    house.scheduler._admit()  # in the order of events this is a plan that went to the other sequence
    house.finish(2)
    house.run()
    assert set(house.toy.ever) == {0, 1}
    assert not house.toy.caches


def test_an_unknown_sequence_cannot_be_ended():
    house = House()
    assert house.scheduler.finish(7, FinishReason.ABORT) is False


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
    house.add([1, 2])
    house.step()
    with pytest.raises(ValueError, match="step"):
        house.scheduler.update(answer)
    assert house.scheduler.num_in_flight == 1, "the plan is still under way"
    house.run()
    house.check_answers()


def test_a_result_nobody_asked_for_is_refused():
    with pytest.raises(ValueError, match="step 0"):
        House().scheduler.update(StepResult(0))


@pytest.mark.parametrize("name", ["max_in_flight", "chunk_size", "max_running", "max_len", "max_held"])
def test_bounds_are_at_least_one(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        House(**{name: 0})
