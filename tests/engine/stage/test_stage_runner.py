"""Plans in, tokens out: a stage does what the plans say, and gives what plain mlx-lm gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from stages import loaded, plain_greedy, plain_sampled, prompt
from tiny import Folder

from splitinfer.core.plan import NewSequence, Save, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.device import Device
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.errors import DeviceFailed, ProtocolError

VOCAB = 160
PROMPT = prompt(20)
GREEDY = SamplingParams()


def runners(folder: Path, *ends: int) -> list[StageRunner]:
    models = enumerate(loaded(folder, *ends))
    return [StageRunner(model, stage, VOCAB, Device(computes_at_launch=True)) for stage, model in models]


@pytest.fixture(scope="module")
def whole(tiny_folder: Folder) -> StageRunner:
    return runners(tiny_folder("llama"), 4)[0]


@pytest.fixture(scope="module")
def halves(tiny_folder: Folder) -> list[StageRunner]:
    return runners(tiny_folder("llama"), 1, 4)


class Steps:
    """Numbers the plans and carries them through one or more stages."""

    def __init__(self, *runners: StageRunner) -> None:
        self.runners = runners
        self.num_steps = 0
        for runner in runners:
            runner.reset()

    def plan(self, *slices: Slice, **more: Sequence[Any]) -> StepPlan:
        self.num_steps += 1
        return StepPlan(self.num_steps - 1, slices=slices, **{name: tuple(values) for name, values in more.items()})

    def last(self, *slices: Slice, **more: Sequence[Any]) -> Finished:
        """What the last stage did."""
        plan, hidden = self.plan(*slices, **more), None
        for runner in self.runners:
            done = runner.finish(runner.launch(plan, hidden))
            hidden = done.hidden
            assert done.plan is plan
        assert hidden is None
        return done

    def run(self, *slices: Slice, **more: Sequence[Any]) -> list[int]:
        """The tokens sampled, in the order of the plan."""
        return [token.token_id for part in self.last(*slices, **more).sampled for token in part.tokens]

    def carry_on(self, seq_id: int, start: int, token: int, num: int) -> list[int]:
        """``num`` decode steps from ``token`` at ``start``; the tokens, ``token`` first."""
        out = [token]
        for i in range(num):
            out += self.run(Slice(seq_id, start + i, (out[-1],), 1))
        return out

    def begin(self, seq_id: int, tokens: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> int:
        (token,) = self.run(Slice(seq_id, 0, tuple(tokens), 1), new=[NewSequence(seq_id, params, seed)])
        return token


@pytest.fixture(params=["whole", "halves"])
def steps(request: pytest.FixtureRequest, whole: StageRunner, halves: list[StageRunner]) -> Steps:
    return Steps(whole) if request.param == "whole" else Steps(*halves)


@pytest.fixture(scope="module")
def expected(tiny_folder: Folder) -> list[int]:
    tokens = plain_greedy(tiny_folder("llama"), PROMPT, 12)
    assert len(set(tokens)) > 5
    return tokens


def test_sampling_is_by_position_and_a_row_of_drafts_gives_what_follows_it(steps: Steps, tiny_folder: Folder):
    right = plain_sampled(tiny_folder("llama"), PROMPT, 8, temperature=0.9, seed=5, vocab_size=VOCAB)
    params = SamplingParams(temperature=0.9)
    assert steps.carry_on(1, 20, steps.begin(1, PROMPT, params, seed=5), 7) == right
    new = [NewSequence(2, params, 5)]
    assert steps.run(Slice(2, 0, (*PROMPT, *right[:4]), 5), new=new) == right[:5]


def test_an_earlier_start_goes_back(steps: Steps, expected: list[int]):
    token = steps.begin(1, PROMPT)
    assert steps.carry_on(1, 20, token, 6) == expected[:7]
    # The same slice again, then a wrong turn, then the right one again: nothing of it stays.
    assert steps.run(Slice(1, 22, tuple(expected[2:5]), 1)) == [expected[5]]
    steps.run(Slice(1, 10, (5, 5, 5, 5, 5), 1))
    assert steps.run(Slice(1, 10, tuple(PROMPT[10:]), 1)) == expected[:1]
    assert steps.carry_on(1, 20, expected[0], 3) == expected[:4]


def test_wrong_drafts_are_dropped_also_of_a_sequence_that_the_next_step_frees(whole: StageRunner, expected: list[int]):
    """An aborted sequence: its last step is under way while the plan that frees it is launched."""
    whole.reset()
    wrong = (expected[1] + 1) % 64
    plans = [
        StepPlan(0, (NewSequence(1, GREEDY, 0),), (Slice(1, 0, tuple(PROMPT), 1),)),
        StepPlan(1, (), (Slice(1, 20, (expected[0], wrong, wrong), 3, num_drafts=2),)),
        StepPlan(2, (), (), (1,)),
    ]
    whole.finish(whole.launch(plans[0], None))
    launched = [whole.launch(plan, None) for plan in plans[1:]]
    (sampled,) = whole.finish(launched[0]).sampled
    assert [token.token_id for token in sampled.tokens] == [expected[1]]


def test_saving_a_block_does_not_copy_its_sequence(whole: StageRunner):
    """Saved, a block shares the sequence's arrays until it is computed; the step must not write to them before."""
    steps, length = Steps(whole), 8192
    steps.begin(1, PROMPT)
    caches = whole.pool.at(1, len(PROMPT))
    for one in caches.own:
        heads, _, width = one.keys.shape[1:]
        one.update_and_fetch(*[mx.zeros((1, heads, length - len(PROMPT), width)) for _ in "kv"])
    caches.place.position = length
    mx.eval([array for one in caches.own for array in (one.keys, one.values)])
    held = sum(array.nbytes for one in caches.own for array in (one.keys, one.values))

    def peak(*slices: Slice, saves: Sequence[Save] = ()) -> int:
        """Bytes that a step needs in addition."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        steps.run(*slices, saves=saves)
        return mx.get_peak_memory() - before

    usual = [peak(Slice(1, length + i, (5,), 1)) for i in range(3)][-1]
    saving = peak(Slice(1, length + 3, (5,), 1), saves=[Save(7, 1, 0, 256)])
    assert saving < usual + held / 8


def refused(runner: StageRunner, plan: StepPlan, hidden: mx.array | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        runner.launch(plan, hidden)
    return str(caught.value)


NEW = (NewSequence(1, GREEDY, 0),)
ONE = (Slice(1, 0, (1, 2), 1),)


@pytest.mark.parametrize(("stage", "hidden"), [(1, mx.zeros((1, 64))), (1, None), (0, mx.zeros((2, 64)))])
def test_hidden_states_of_another_number_are_refused(halves: list[StageRunner], stage: int, hidden: mx.array | None):
    halves[stage].reset()
    assert "step 0" in refused(halves[stage], StepPlan(0, NEW, ONE), hidden)
    assert not halves[stage].pool._entries, "refused before anything was changed"


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (Slice(1, 0, (5, 160), 1), "token id 160, and the model has 160"),
        (Slice(1, 0, (-1,), 1), "token id -1, and"),
        (Slice(1, 0, (1, 2), 1, scored=(2**30,)), "token id 1073741824"),
        (Slice(1, 8, (1, 2, 3), 1), "goes beyond the 10 tokens"),
    ],
)
def test_a_plan_that_the_stage_cannot_carry_out_is_refused(whole: StageRunner, part: Slice, sentence: str):
    """Before its rows come: MLX would read whatever lies where a token that the model lacks would be."""
    with pytest.raises(ProtocolError, match=sentence):
        whole.check(StepPlan(0, NEW, (part,)), longest=10)


# -- drafts ----------------------------------------------------------------------------------------


def last_rows(steps: Steps, *slices: Slice) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of each slice of one step, and how many rows the last stage computed for them."""
    done = steps.last(*slices)
    return [tuple(token.token_id for token in part.tokens) for part in done.sampled], done.figures().rows


def test_right_drafts_are_taken_and_one_more(steps: Steps, expected: list[int]):
    assert steps.begin(1, PROMPT) == expected[0]
    part = Slice(1, 20, tuple(expected[:4]), 4, num_drafts=3)
    assert last_rows(steps, part) == ([tuple(expected[1:5])], 4)
    behind = Slice(1, 24, tuple(expected[4:7]), 3, num_drafts=3)
    assert last_rows(steps, behind) == ([tuple(expected[5:8])], 3)
    wrong = (expected[7] + 1) % 100
    assert last_rows(steps, Slice(1, 27, (wrong, 5), 2, num_drafts=2)) == ([()], 0), "not even its first draft"
    assert steps.carry_on(1, 27, expected[7], 2) == expected[7:10]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(repetition_penalty=1.5)], ids=["greedy", "penalty"])
@pytest.mark.parametrize("right", [0, 2])
def test_a_wrong_draft_ends_the_verdict_and_voids_what_follows(steps: Steps, right: int, params: SamplingParams):
    """Penalties see drafts, and no longer those that were wrong; another sequence beside is not touched."""
    other = steps.begin(2, prompt(9, seed=3))
    others = steps.carry_on(2, 9, other, 2)
    expected = steps.carry_on(1, 20, steps.begin(1, PROMPT, params), 8)
    steps.run(freed=[1])
    steps.begin(1, PROMPT, params)
    drafts = [*expected[1:4]]
    drafts[right] = (drafts[right] + 1) % 100
    said, _ = last_rows(steps, Slice(1, 20, (expected[0], *drafts), 4, num_drafts=3))
    assert said == [tuple(expected[1 : right + 2])]
    void = Slice(1, 24, tuple(expected[4:7]), 3, num_drafts=3)
    assert last_rows(steps, void, Slice(2, 9, (other,), 1)) == ([(), (others[1],)], 1), "nothing is computed for it"
    happens_to = Slice(1, 24, (expected[right + 1], 8), 2, num_drafts=2)  # begin with what was sampled, elsewhere
    assert last_rows(steps, happens_to) == ([()], 0)
    at = 20 + right + 1
    assert steps.carry_on(1, at, expected[right + 1], 4) == expected[right + 1 : right + 6]


def test_a_step_that_may_be_void_waits_for_the_verdict_before_it(whole: StageRunner, halves: list[StageRunner]):
    sure, guessed = Slice(1, 20, (1, 2), 2, num_drafts=1), Slice(1, 22, (3,), 1, num_drafts=1)
    assert not whole.needs_verdict(StepPlan(0, slices=(sure,)))
    assert whole.needs_verdict(StepPlan(0, slices=(guessed,)))
    assert not halves[0].needs_verdict(StepPlan(0, slices=(guessed,))), "only the last stage knows verdicts"


def test_the_step_before_a_launch_that_fails_counts_as_failed_too(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """Its event came before MLX noted the error, and the launch that came next was told."""
    (runner,) = runners(tiny_folder("llama"), 4)
    first = runner.launch(StepPlan(0, new=(NewSequence(1, GREEDY, 0),), slices=(Slice(1, 0, tuple(PROMPT), 1),)), None)

    def refuse(*_arrays: Any) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    with monkeypatch.context() as failing:
        failing.setattr(mx, "async_eval", refuse)
        with pytest.raises(DeviceFailed):
            runner.launch(StepPlan(1, slices=(Slice(1, 20, (3,), 1),)), None)
    with pytest.raises(DeviceFailed, match="no memory left"):
        runner.finish(first)
    steps = Steps(runner)  # which are opened again
    assert steps.begin(1, PROMPT) in range(VOCAB)
