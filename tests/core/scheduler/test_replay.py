"""After a stage was lost, the scheduler's next plans rebuild what the stages held, and nothing is sampled twice."""

from hypothesis import given
from hypothesis import strategies as st
from toy import ToyStage, alone, config_of, small

from splitinfer.core.plan import StepPlan
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler import invariants
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence

MAX_LEN = 1000


def make(seq_id: int, tokens: list[int]) -> Sequence:
    return Sequence(seq_id, list(tokens), SamplingParams(max_tokens=6), seed=0)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4),
    losses=st.lists(st.integers(0, 12), max_size=6),
    chunk=st.integers(1, 5),
    whole_blocks=st.booleans(),
    num_groups=st.integers(1, 3),
)
def test_losing_the_stages_changes_no_token(
    prompts: list[list[int]], losses: list[int], chunk: int, whole_blocks: bool, num_groups: int
) -> None:
    with small(block=3):
        config = config_of(
            num_groups=num_groups,
            max_in_flight=3,
            token_budget=chunk,
            max_running=4,
            max_len=MAX_LEN,
            whole_blocks=whole_blocks,
        )
        scheduler = Scheduler(config)
        stages, under_way, due = ToyStage(whole_blocks=whole_blocks), list[StepPlan](), list(losses)
        sequences = [make(i, tokens) for i, tokens in enumerate(prompts)]
        for seq in sequences:
            scheduler.add(seq)
        for turn in range(10_000):
            invariants.check(scheduler)
            if due and turn >= due[0]:
                due = [turn + 1 + gap for gap in due[1:]]
                stages, under_way = ToyStage(whole_blocks=whole_blocks), []
                scheduler.requeue_all()
                invariants.check(scheduler)
            plan = scheduler.schedule()
            if plan is not None:
                under_way.append(plan)
            elif under_way:
                scheduler.update(stages.run(under_way.pop(0)))
            elif scheduler.is_idle:
                break
        wanted = [tokens + alone(make(0, tokens), tokens, MAX_LEN)[0] for tokens in prompts]
        assert [seq.tokens for seq in sequences] == wanted
        assert not stages.caches
        assert set(stages.blocks) == {block.block_id for block in scheduler.prefix_cache.tree}
