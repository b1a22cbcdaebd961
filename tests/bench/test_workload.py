"""What is run: the same from the same seed, never the same twice within it."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.bench.shared.workload import DECODE_PROMPT, KINDS, STEP_SIZES, Workload, step_sizes, turns

workloads = st.builds(
    Workload,
    trials=st.integers(1, 6),
    prompt_tokens=st.integers(1, 300),
    decode_tokens=st.integers(4, 50),
    vocab_size=st.integers(2, 9000),
    seed=st.integers(0, 5),
)


@given(workloads)
def test_tasks_are_what_was_asked_for_and_come_again(work: Workload) -> None:
    again = Workload(work.trials, work.prompt_tokens, work.decode_tokens, work.vocab_size, work.seed)
    for trial in range(work.trials):
        decode, prefill = work.task("decode", trial), work.task("prefill", trial)
        assert (len(decode.prompt), decode.max_tokens) == (DECODE_PROMPT, work.decode_tokens)
        assert (len(prefill.prompt), prefill.max_tokens) == (work.prompt_tokens, 1)
        assert again.task("decode", trial) == decode
        for task in (decode, prefill):
            assert all(0 <= token < work.vocab_size for token in task.prompt)
            assert len(task.prompt) + task.max_tokens <= work.longest


def test_no_prompt_comes_twice() -> None:
    work = Workload(trials=20, prompt_tokens=64, decode_tokens=8, vocab_size=300, streams=(2, 8))
    prompts = [work.task(kind, trial).prompt for kind in KINDS for trial in range(work.trials)]
    prompts += [work.warm_up(kind).prompt for kind in KINDS]
    prompts += [p for n in work.streams for trial in range(-1, 20) for p in work.batch(n, trial, 2).prompts]
    assert len(set(prompts)) == len(prompts) == 42 + 21 * 20
    assert Workload(20, 64, 8, 300, seed=2).task("prefill", 0).prompt not in prompts
    assert work.batch(2, 0, 2).prompts[:2] == work.batch(2, 0, 1).prompts, "more stages have more of the same"


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=4), st.integers(1, 4))
def test_everybody_has_the_same_turns_and_they_alternate(systems: list[int], trials: int) -> None:
    order = list(turns(systems, trials))
    assert len(set(order)) == len(order) == trials * len(KINDS) * len(systems)
    assert len(list(turns(systems, trials, (4, 8)))) == len(order) + trials * 2 * len(systems)
    assert [system for _, _, system in order] == systems * (trials * len(KINDS))
    assert [trial for trial, _, _ in order] == sorted(trial for trial, _, _ in order)


@given(st.integers(1, 5000))
def test_step_sizes_worth_trying_differ_in_what_they_do(prompt_tokens: int) -> None:
    sizes = step_sizes(prompt_tokens)
    assert sizes[0] == STEP_SIZES[0]  # mlx-lm's default is always among them
    in_effect = [min(size, prompt_tokens) for size in sizes]
    assert len(set(in_effect)) == len(in_effect)
