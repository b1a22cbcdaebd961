"""The promise with drafts: every drafter, however wrong, and every flight give the tokens there are without."""

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import tiny
from effort import long, thorough
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stages import layout, pipeline, plain_greedy, prompt, shorten_blocks, tokens_of, worker

from splitinfer import LLM, Flight, SamplingParams, Settings
from splitinfer.bench.speculation.replay import Replay
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.speculation import Draft
from splitinfer.demo import TARGET
from splitinfer.engine.device.device import Device
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.drafts.drafters import NGramDrafter, in_rounds
from splitinfer.engine.stage import loader as stage_loader
from splitinfer.engine.stage import runner as stage_runner
from splitinfer.errors import LayoutError, ModelError

PROMPT = prompt(40)
NUM = 24
FLIGHTS = [Flight(1), Flight(4), Flight(8), Flight(1, 1, 2), Flight(2, 5, 2), Flight(8, 8, 3), Flight(3, 4, 3)]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "seed": 5}


class Dice:
    """Guesses that are right with probability ``right``, where it knows the answer, and sometimes fewer."""

    name = "dice"

    def __init__(self, right: float, seed: int = 1) -> None:
        self.right, self.random = right, Random(seed)
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.pause = 0.0

    def use_device(self, _device: Device) -> None:
        pass

    def prepare(self, _seq: Sequence) -> bool:
        return False

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        answer = self.answers.get(tuple(seq.tokens[: seq.num_prompt_tokens]), [])
        first = len(seq.stream) - seq.num_prompt_tokens
        for place in range(first, first + count):
            time.sleep(self.pause)
            token = answer[place] if place < len(answer) else self.random.randrange(100)
            is_right = self.random.random() < self.right
            yield Draft(token if is_right else (token + self.random.randrange(1, 90)) % 100)
            if self.random.random() < 0.05:
                return

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        return in_rounds([self.drafts(seq, count) for seq, count in zip(seqs, counts, strict=True)], counts)

    def forget(self, _seq_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def dice() -> Dice:
    return Dice(0.7)


@pytest.fixture(scope="module", params=[2, 3])
def llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], dice: Dice) -> Iterator[LLM]:
    cuts = {2: [1, 3], 3: [1, 2, 1]}[request.param]
    with pipeline(tiny_folder("llama"), cuts, "inproc", drafter=lambda: dice, token_budget=16) as opened:
        yield opened


def answer(
    llm: LLM, dice: Dice, tokens: list[int], flight: Flight | None, num: int = NUM, **params: object
) -> list[int]:
    p = SamplingParams(max_tokens=num, ignore_eos=True, **params)  # type: ignore[arg-type]
    if tuple(tokens) not in dice.answers or flight is not None:
        dice.answers.setdefault(tuple(tokens), llm.submit(tokens, p, flight=Flight()).result().token_ids)
    return llm.submit(tokens, p, flight=flight).result().token_ids


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "params",
    [{}, SAMPLED, {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {9: 1.0}}],
    ids=["greedy", "sampled", "penalties"],
)
def test_every_drafter_and_every_flight(llm: LLM, dice: Dice, right: float, params: dict[str, float]) -> None:
    dice.right = right
    dice.answers.clear()
    plain = SamplingParams(max_tokens=NUM, ignore_eos=True, **params)  # type: ignore[arg-type]
    expected = llm.submit(PROMPT, plain, flight=Flight()).result().token_ids
    assert len(set(expected)) > 5
    dice.answers[tuple(PROMPT)] = expected
    before = llm.stats()["speculation"]
    for flight in [None, *thorough(FLIGHTS[::3], FLIGHTS)]:
        assert llm.submit(PROMPT, plain, flight=flight).result().token_ids == expected, flight
    after = llm.stats()["speculation"]
    assert after["sent"] > before["sent"] + 50
    accepted, tried = after["accepted"] - before["accepted"], sum(after["tried_at"]) - sum(before["tried_at"])
    assert accepted == tried if right == 1.0 else accepted <= 0.9 * tried
    if right == 0.0:
        assert accepted == 0


@settings(max_examples=thorough(4, 60), suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=30),
    st.builds(Flight, st.integers(0, 8), st.integers(0, 8), st.integers(1, 3)),
    st.sampled_from([0.0, 0.8]), st.floats(0, 1), st.integers(1, 20), st.integers(0, 3),
)  # fmt: skip
def test_any_prompt_any_flight(
    llm: LLM, dice: Dice, tokens: list[int], flight: Flight, temperature: float, right: float, num: int, seed: int
) -> None:
    dice.right = right
    params = SamplingParams(max_tokens=num, temperature=temperature, seed=seed)  # may end before
    expected = llm.submit(tokens, params, flight=Flight()).result()
    dice.answers = {tuple(tokens): expected.token_ids}
    got = llm.submit(tokens, params, flight=flight).result()
    assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_mlx_lm_says_the_same(tiny_folder: Callable[..., Path]) -> None:
    expected = plain_greedy(tiny_folder("llama"), PROMPT, NUM)
    dice = Dice(0.8)
    dice.answers[tuple(PROMPT)] = expected
    with pipeline(tiny_folder("llama"), [2, 2], "tcp", drafter=lambda: dice, flight=Flight(3, 4, 2)) as llm:
        assert tokens_of(llm, PROMPT, max_tokens=NUM) == expected


@pytest.mark.parametrize("name", [n for n in tiny.CONFIGS if n not in tiny.SAME_CHUNKS_ONLY])
def test_architectures(name: str, tiny_folder: Callable[..., Path]) -> None:
    layers = tiny.CONFIGS[name]["num_hidden_layers"]
    dice = Dice(0.7)
    with pipeline(tiny_folder(name), [1, layers - 1], drafter=lambda: dice, token_budget=16) as llm:
        long = prompt(70)  # past the sliding windows
        for params in ({}, SAMPLED):
            plain = SamplingParams(max_tokens=40, ignore_eos=True, **params)  # type: ignore[arg-type]
            expected = llm.submit(long, plain, flight=Flight()).result().token_ids
            dice.answers[tuple(long)] = expected
            for flight in (Flight(4), Flight(3, 6, 2)):
                assert llm.submit(long, plain, flight=flight).result().token_ids == expected


# -- with everything else --------------------------------------------------------------------------


def test_among_others_that_come_and_go(llm: LLM, dice: Dice) -> None:
    """Drafts stop when others come, and go on when they have left; nobody's tokens change."""
    dice.right = 0.8
    prompts = [prompt(n, seed=n) for n in (5, 30, 9, 18)]
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=7, ignore_eos=True)
        for n, t in ((40, 0), (9, 0.8), (25, 0), (6, 0.8))
    ]
    for p, params_ in zip(prompts, params, strict=True):
        dice.answers[tuple(p)] = llm.submit(p, params_, flight=Flight()).result().token_ids
    for delay in (0.0, 0.005, 0.02):
        requests = []
        for p, params_ in zip(prompts, params, strict=True):
            requests.append(llm.submit(p, params_, flight=Flight(3, 4, 2)))
            time.sleep(delay)
        for p, request in zip(prompts, requests, strict=True):
            assert request.result().token_ids == dice.answers[tuple(p)]


def test_aborted_in_the_middle_of_a_block(llm: LLM, dice: Dice) -> None:
    dice.right = 0.9
    expected = answer(llm, dice, PROMPT, None, 60)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for after in (1, 4, 9):
        request = llm.submit(PROMPT, params, flight=Flight(5, 6, 2))
        for event in request:
            if len(request.output.token_ids) >= after:
                request.abort()
            assert event.error is None
        assert request.output.finish_reason in ("abort", "length")
        assert request.output.token_ids == expected[: len(request.output.token_ids)]
    assert answer(llm, dice, PROMPT, Flight(5, 6, 2), 60) == expected
    deadline = time.monotonic() + 5
    while llm.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(stage["kv_bytes"] == 0 for stage in llm.stats()["stages"])


def test_logprobs_are_the_same(llm: LLM, dice: Dice) -> None:
    dice.right = 0.8
    params = SamplingParams(max_tokens=NUM, ignore_eos=True, logprobs=3)
    plain = llm.submit(PROMPT, params, flight=Flight()).result()
    dice.answers[tuple(PROMPT)] = plain.token_ids
    drafted = llm.submit(PROMPT, params, flight=Flight(3, 4, 2)).result()
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.logprobs is not None
    assert len(drafted.logprobs) == NUM


def test_stop_tokens_and_lengths_inside_a_block(llm: LLM, dice: Dice) -> None:
    dice.right = 1.0
    expected = answer(llm, dice, PROMPT, None)
    for at in range(1, 12):
        if expected[at] in expected[:at]:
            continue
        for params in (SamplingParams(max_tokens=NUM, stop_token_ids=(expected[at],), ignore_eos=True),
                       SamplingParams(max_tokens=at + 1, ignore_eos=True)):  # fmt: skip
            got = llm.submit(PROMPT, params, flight=Flight(6, 6, 2)).result()
            assert got.token_ids == expected[: at + 1]


def test_stop_strings_inside_a_block() -> None:
    text = "Once upon a time there was a poor woodcutter who"
    dice = Dice(1.0)
    with pipeline(TARGET, [3, 9], drafter=lambda: dice) as llm:
        tokens = llm.encode(text)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        whole = llm.submit(tokens, params, flight=Flight()).result()
        dice.answers[tuple(tokens)] = whole.token_ids
        middle = whole.text[len(whole.text) // 2 :][:7]
        stopping = SamplingParams(max_tokens=40, ignore_eos=True, stop=(middle,))
        plain, drafted = (llm.submit(tokens, stopping, flight=f).result() for f in (Flight(), Flight(6, 6, 2)))
        assert (drafted.text, drafted.token_ids, drafted.finish_reason) == (plain.text, plain.token_ids, "stop")
        assert drafted.text == whole.text[: whole.text.index(middle)]


def test_short_memory_takes_turns(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that give up their KV, with drafts under way before and after."""
    shorten_blocks(monkeypatch, 8)
    dice = Dice(0.8)
    prompts = [prompt(n, seed=n) for n in (6, 11, 17)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    folder = tiny_folder("llama")
    with pipeline(folder, [1, 2, 1], drafter=lambda: dice, token_budget=16) as llm:
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
        for p in prompts:
            dice.answers[tuple(p)] = llm.submit(p, params, flight=Flight()).result().token_ids
    with pipeline(folder, [1, 2, 1], drafter=lambda: dice, token_budget=16, kv_bytes=per_token * 80) as llm:
        for _ in range(3):
            requests = [llm.submit(p, params, flight=Flight(3, 4, 3)) for p in prompts]
            for p, request in zip(prompts, requests, strict=True):
                assert request.result().token_ids == dice.answers[tuple(p)]
        assert llm.stats()["preemptions"] > 0


def test_kept_kv_is_of_right_tokens_only(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, 8)
    dice = Dice(0.6)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with pipeline(tiny_folder("llama"), [2, 2], drafter=lambda: dice, prefix_cache=False) as llm:
        first = llm.submit(PROMPT, params, flight=Flight()).result().token_ids
        turn = [*PROMPT, *first, 7, 8, 9]
        second = llm.submit(turn, params, flight=Flight()).result().token_ids
        dice.answers = {tuple(PROMPT): first, tuple(turn): second}
    with pipeline(tiny_folder("llama"), [2, 2], drafter=lambda: dice) as llm:
        assert llm.submit(PROMPT, params, flight=Flight(4, 5, 2)).result().token_ids == first
        out = llm.submit(turn, params, flight=Flight(4, 5, 2)).result()
        assert out.token_ids == second
        assert out.num_cached_tokens >= len(PROMPT) + 24


def test_drafting_ends_when_a_result_says_it_is_no_use(tiny_folder: Callable[..., Path]) -> None:
    """Between two guesses the loop listens; a slow drafter that is always wrong does not draft on behind a miss."""
    dice = Dice(0.0)
    with pipeline(tiny_folder("llama"), [1, 3], drafter=lambda: dice) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        expected = llm.submit(PROMPT, params, flight=Flight()).result().token_ids
        dice.answers[tuple(PROMPT)] = expected
        dice.pause = 0.02
        assert llm.submit(PROMPT, params, flight=Flight(1, 16, 2)).result().token_ids == expected
        found = llm.stats()["speculation"]
        assert found["drafted"] < 12 * 10, "sixteen after each miss would be far more"
        assert found["sent"] < 40


def test_a_session_of_threads(llm: LLM, dice: Dice) -> None:
    dice.right = 0.8
    prompts = [prompt(7 + n, seed=n) for n in range(6)]
    expected = [answer(llm, dice, p, None, 12) for p in prompts]
    got: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        got[i] = answer(llm, dice, prompts[i], None, 12)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == expected


def test_where_steps_are_launched_ahead(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the next step is launched before the last one is sent on, but for a verdict."""
    monkeypatch.setattr(stage_loader, "open_device", lambda *_: MlxDevice(computes_at_launch=False))
    dice = Dice(0.7)
    for cuts in ([1, 3], [1, 2, 1], [4]):
        with pipeline(tiny_folder("llama"), cuts, drafter=lambda: dice, token_budget=16) as llm:
            for params in (SamplingParams(max_tokens=NUM, ignore_eos=True), SamplingParams(max_tokens=NUM, **SAMPLED)):  # type: ignore[arg-type]
                expected = llm.submit(PROMPT, params, flight=Flight()).result().token_ids
                dice.answers[tuple(PROMPT)] = expected
                for flight in (Flight(4), Flight(2, 5, 2), Flight(3, 3, 3)):
                    assert llm.submit(PROMPT, params, flight=flight).result().token_ids == expected


def test_more_groups_than_stages(tiny_folder: Callable[..., Path]) -> None:
    dice = Dice(1.0)
    with pipeline(tiny_folder("llama"), [1, 3], drafter=lambda: dice, micro_batches=3) as llm:
        expected = answer(llm, dice, PROMPT, None)
        for _ in range(3):
            assert answer(llm, dice, PROMPT, Flight(3, 4, 2)) == expected
        assert all(1 in seconds for seconds in llm.stats()["speculation"]["step_seconds_by_rows"])


# -- real drafters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flight", [None, long(Flight(3)), Flight(3, 4, 2)], ids=["controller", "synchronous", "in flight"]
)
def test_the_demo_pair(flight: Flight | None) -> None:
    outs = {}
    for draft in ("none", "demo-draft", "ngram", "demo-draft+ngram"):
        with demo_with(draft, flight) as llm:
            tokens = llm.encode("Once upon a time there was a poor woodcutter who")
            for params in ({}, {"temperature": 0.8, "seed": 3}):
                outs[draft, len(params)] = tokens_of(llm, tokens, max_tokens=40, **params)
            found = llm.stats()["speculation"]
        if draft == "none":
            assert found is None
        else:
            assert found["drafter"] == draft
            assert found["accepted"] > 0 or draft == "ngram", "nothing repeats in so few tokens, or drafts do not pay"
    for kind in (0, 2):
        assert outs["demo-draft", kind] == outs["ngram", kind] == outs["none", kind] == outs["demo-draft+ngram", kind]


@contextmanager
def demo_with(draft: str, flight: Flight | None) -> Iterator[LLM]:
    with worker("inproc") as address:
        made = layout(TARGET, [3, 9], [address]) | {"draft": draft if draft != "none" else None}
        with LLM(made, settings=Settings(flight=flight)) as llm:
            yield llm


def test_ngrams_follow_a_text_that_repeats() -> None:
    drafter = NGramDrafter()
    seq = Sequence(1, [4, 5, 6, 7, 4, 5], SamplingParams(), 0)
    assert [d.token_id for d in drafter.drafts(seq, 4)] == [6, 7, 4, 5]
    seq.drafts.ahead = [6, 9]
    assert [d.token_id for d in drafter.drafts(seq, 4)] == []
    other = Sequence(2, [8, 3, 8], SamplingParams(), 0)
    rounds = drafter.draft_together([seq, other, Sequence(3, [1, 2], SamplingParams(), 0)], [0, 3, 5])
    assert list(rounds) == [[None, Draft(3), None], [None, Draft(8), None], [None, Draft(3), None]]
    drafter.forget(1)
    drafter.forget(1)
    assert not drafter.prepare(seq)


def test_replay_is_as_wrong_as_it_is_told(tiny_folder: Callable[..., Path]) -> None:
    replay = Replay(150)
    replay.know(PROMPT, range(100))
    seq = Sequence(1, list(PROMPT), SamplingParams(), 0)
    for error in (0.0, 0.3, 1.0):
        wrong = 0
        for seed in range(20):
            replay.error, replay.seed = error, seed
            guesses = [d.token_id for d in replay.drafts(seq, 100)]
            wrong += sum(a != b for a, b in zip(guesses, range(100), strict=True))
        assert wrong / 2000 == pytest.approx(error, abs=0.001), "of each fifty, so many"
    assert list(replay.drafts(Sequence(2, [1], SamplingParams(), 0), 3)) == []
    assert tuple(PROMPT) in replay


# -- what cannot be ------------------------------------------------------------------------------


def test_a_model_that_cannot_go_back_is_refused_with_its_reason(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("qwen3_next")
    monkeypatch.setattr(stage_runner, "try_rollback", lambda _model, _step: None)
    with (
        pytest.raises(ModelError, match="keep a state that cannot be rolled back"),
        pipeline(folder, [1, 3], draft="ngram"),
    ):
        pass


@pytest.mark.parametrize("cuts", [[4], [1, 3], [1, 2, 1]], ids=str)
def test_states_are_put_back(cuts: list[int], tiny_folder: Callable[..., Path]) -> None:
    """Recurrent kernels round by chunks, so tokens may part at a near-tie; these do not."""
    dice = Dice(0.6)
    with pipeline(tiny_folder("qwen3_next"), cuts, drafter=lambda: dice, token_budget=64) as llm:
        for number in range(thorough(2, 3)):
            tokens = prompt(30, seed=number)
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            expected = llm.submit(tokens, params, flight=Flight()).result().token_ids
            dice.answers[tuple(tokens)] = expected
            for flight in (*thorough((), (Flight(1),)), Flight(6), Flight(2, 3, 2), Flight(5, 5, 3)):
                assert llm.submit(tokens, params, flight=flight).result().token_ids == expected, flight
        assert llm.stats()["speculation"]["accepted"] > 50


def test_a_draft_of_another_vocabulary_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(LayoutError, match="vocabulary"), pipeline(TARGET, [12], draft=str(tiny_folder("llama"))):
        pass
