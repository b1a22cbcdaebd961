"""A stage's device has room for less than its budget says: fewer requests run at a time, and only what cannot fit alone
ends."""

from hypothesis import given
from hypothesis import strategies as st
from toy import ToyStage, alone, blocks, config_of, small

from splitinfer.core.kv.budget import KVBudget, KVUse, StageKV
from splitinfer.core.plan import StepPlan
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason, Sequence
from tests.core import invariants

BLOCK = 3
MAX_LEN = 1000
STAGE = StageKV(10**9, 1, stored=BLOCK)  # as ``blocks`` makes them


def make(seq_id: int, tokens: list[int], max_tokens: int) -> Sequence:
    return Sequence(seq_id, list(tokens), SamplingParams(max_tokens=max_tokens), seed=0)


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9)), min_size=1, max_size=6
    ),
    capacity=st.integers(2, 12),
    num_groups=st.integers(1, 3),
    chunk=st.integers(1, 5),
)
def test_all_that_fits_gets_its_tokens(
    requests: list[tuple[list[int], int]], capacity: int, num_groups: int, chunk: int
) -> None:
    """``capacity``: blocks that there is memory for. The budget never falls below three quarters of that."""
    with small(block=BLOCK):
        config = config_of(
            num_groups=num_groups, max_in_flight=3, token_budget=chunk, max_running=4, max_len=MAX_LEN, kv=blocks(40)
        )
        scheduler, stages, under_way = Scheduler(config), ToyStage(), list[StepPlan]()
        sequences = [make(i, tokens, max_tokens) for i, (tokens, max_tokens) in enumerate(requests)]
        for seq in sequences:
            scheduler.add(seq)
        num_short, unable = 0, set[int]()
        for _ in range(10_000):
            for seq, error in scheduler.unable():
                assert error.needed > 0.75 * capacity * BLOCK, "it would have fitted"
                assert scheduler.finish(seq.seq_id, FinishReason.ERROR)
                unable.add(seq.seq_id)
            invariants.check(scheduler)
            plan = scheduler.schedule()
            if STAGE.bytes_of(scheduler.kv.used + scheduler.kv.stored) > capacity * BLOCK:
                assert scheduler.lower_budget(0)
                scheduler.requeue_all()
                stages, under_way, num_short = ToyStage(), [], num_short + 1
            elif plan is not None:
                under_way.append(plan)
            elif under_way:
                scheduler.update(stages.run(under_way.pop(0)))
            elif scheduler.is_idle:
                break
        else:
            raise AssertionError("it never ends")
        assert num_short <= 20
        for seq, (tokens, max_tokens) in zip(sequences, requests, strict=True):
            wanted = tokens + alone(make(0, tokens, max_tokens), tokens, MAX_LEN)[0]
            assert seq.tokens == (wanted[: len(seq.tokens)] if seq.seq_id in unable else wanted)


def test_a_budget_is_lowered_on_one_stage_and_never_raised() -> None:
    budget = KVBudget((StageKV(1000, 1), StageKV(1000, 2)))
    lowered = budget.lowered(1, KVUse(2, 100))
    assert lowered.stages == (StageKV(1000, 1), StageKV(150, 2))
    assert lowered.lowered(1, KVUse(2, 100)).stages[1].budget_bytes == 112, "three quarters of what there was"
    assert budget.lowered(2, KVUse(1, 10)) == budget
    assert KVBudget().lowered(0, KVUse(1, 10)) == KVBudget()


def test_without_a_bound_nothing_can_be_lowered() -> None:
    with small():
        scheduler = Scheduler(config_of())
        assert not scheduler.lower_budget(0)
        scheduler.add(make(1, [1, 2], 3))
        assert scheduler.unable() == []
