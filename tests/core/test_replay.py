"""After a stage was lost, the scheduler's next plans rebuild what the stages held, and nothing is sampled twice."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.plan import SampledSlice, SampledToken, StepPlan, StepResult
from splitinfer.core.scheduler import Scheduler, SchedulerConfig
from splitinfer.core.sequence import SamplingParams, Sequence


def next_token(tokens: list[int]) -> int:
    """A toy model: depends on every token and on their order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % 101
    return value


class ToyStages:
    """Holds each sequence's tokens as its KV, just as the plans say."""

    def __init__(self) -> None:
        self.kv: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.freed:
            del self.kv[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.kv
            self.kv[new.seq_id] = [] if new.parent is None else self.kv.pop(new.parent)
        sampled = []
        for part in plan.slices:
            kv = self.kv[part.seq_id]
            assert part.start <= len(kv)
            kv[part.start :] = part.token_ids
            if part.num_logits:
                sampled.append(SampledSlice(part.seq_id, (SampledToken(next_token(kv)),)))
        return StepResult(plan.step, tuple(sampled))


def make(seq_id: int, tokens: list[int], session: str | None = None) -> Sequence:
    return Sequence(seq_id, list(tokens), SamplingParams(max_tokens=6), seed=0, session=session)


def alone(tokens: list[int]) -> list[int]:
    out = list(tokens)
    for _ in range(6):
        out.append(next_token(out))
    return out


@given(
    prompts=st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=9), min_size=1, max_size=4),
    losses=st.lists(st.integers(0, 12), max_size=6),
    chunk=st.integers(1, 5),
    sessions=st.booleans(),
    num_groups=st.integers(1, 3),
)
def test_losing_the_stages_changes_no_token(
    prompts: list[list[int]], losses: list[int], chunk: int, sessions: bool, num_groups: int
) -> None:
    scheduler = Scheduler(SchedulerConfig(num_groups, max_in_flight=3, token_budget=chunk, max_running=4, max_len=1000))
    stages, under_way, due = ToyStages(), list[StepPlan](), list(losses)
    sequences = [make(i, tokens, "s" if sessions else None) for i, tokens in enumerate(prompts)]
    for seq in sequences:
        scheduler.add(seq)
    for turn in range(10_000):
        scheduler.check()
        if due and turn >= due[0]:
            due = [turn + 1 + gap for gap in due[1:]]
            stages, under_way = ToyStages(), []
            scheduler.replay()
            scheduler.check()
        plan = scheduler.schedule()
        if plan is not None:
            under_way.append(plan)
        elif under_way:
            scheduler.update(stages.run(under_way.pop(0)))
        elif scheduler.is_idle:
            break
    assert [seq.tokens for seq in sequences] == [alone(tokens) for tokens in prompts]
    scheduler.drop("s")
    plan = scheduler.schedule()
    if plan is not None:
        scheduler.update(stages.run(plan))
    assert stages.kv == {}
