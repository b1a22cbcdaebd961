"""A model as drafter: that it says what it would say alone, whatever was rolled back in between."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from stages import plain_greedy, plain_sampled

from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.demo import TARGET
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.errors import ModelError
from splitinfer.models.hub import open_model

DRAFT = TARGET.parent / "draft"
PROMPT = [5, 90, 7, 300, 41, 8, 1000, 77, 3, 250, 60, 12]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "ahead"])
def model(request: pytest.FixtureRequest) -> DraftModel:
    made = DraftModel.load("draft", open_model("demo-draft"), "float32", 2048, 512)
    made._ahead = request.param
    return made


def guesses(model: DraftModel, seq: Sequence, count: int) -> list[int]:
    return [draft.token_id for draft in model.drafts(seq, count)]


def test_it_says_what_it_says_alone(model: DraftModel) -> None:
    expected = plain_greedy(DRAFT, PROMPT, 20)
    seq = Sequence(1, list(PROMPT), GREEDY, 0)
    said = guesses(model, seq, 5)
    seq.ahead = list(said)
    said += guesses(model, seq, 7)
    seq.tokens += said[:6]
    seq.ahead, seq.drafted = said[6:9], said[9:]
    said += guesses(model, seq, 8)
    assert said == expected
    model.forget(1)


def test_it_draws_with_the_targets_noise(model: DraftModel) -> None:
    expected = plain_sampled(DRAFT, PROMPT, 20, temperature=0.8, seed=9, vocab_size=2048)
    seq = Sequence(2, list(PROMPT), SAMPLED, 9)
    assert guesses(model, seq, 20) == expected
    model.forget(2)


def test_it_follows_every_rollback(model: DraftModel) -> None:
    """After a miss the stream is another; what it says is what a fresh one says to it."""
    seq = Sequence(3, list(PROMPT), GREEDY, 0)
    for number, count in enumerate((4, 1, 6, 3, 0, 5)):
        said = guesses(model, seq, 6)
        seq.tokens += [*said[:count], (17 * number + 5) % 2048]
        fresh = Sequence(100 + number, list(seq.tokens), GREEDY, 0)
        assert guesses(model, seq, 4) == guesses(model, fresh, 4)
        model.forget(100 + number)


def test_a_generator_that_is_left_early_does_no_harm(model: DraftModel) -> None:
    seq = Sequence(4, list(PROMPT), GREEDY, 0)
    drafts = model.drafts(seq, 6)
    first = [next(drafts).token_id for _ in range(2)]
    drafts.close()
    seq.tokens += first
    assert [*first, *guesses(model, seq, 4)] == plain_greedy(DRAFT, PROMPT, 6)


def test_confidence_is_the_models_own_probability(model: DraftModel) -> None:
    seq = Sequence(5, list(PROMPT), SamplingParams(temperature=0.8, logprobs=4), 1)
    whole = model._model
    for draft in model.drafts(seq, 5):
        caches = whole.make_caches()
        logits = whole(mx.array([seq.stream], dtype=mx.int32), caches, None, 1)[0, 0]
        assert draft.confidence == pytest.approx(mx.softmax(logits)[draft.token_id].item(), rel=1e-3)
        seq.drafted.append(draft.token_id)


def test_a_long_prompt_is_read_in_parts(model: DraftModel) -> None:
    long = [(7 * i * i + 3 * i) % 2048 for i in range(300)]
    seq = Sequence(6, long, GREEDY, 0)
    parts = 0
    while model.prepare(seq):
        parts += 1
    assert parts == 3
    assert guesses(model, seq, 6) == plain_greedy(DRAFT, long, 6)


def test_memory_is_kept_for_a_few(model: DraftModel) -> None:
    for seq_id in range(200, 230):
        guesses(model, Sequence(seq_id, list(PROMPT), GREEDY, 0), 1)
    assert len(model._entries) <= 8


def test_a_draft_that_cannot_go_back_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="cannot go back"):
        DraftModel.load("next", open_model(str(tiny_folder("qwen3_next"))), "float32", 100, 128)


def test_sliding_windows_go_back_far_enough(tiny_folder: Callable[..., Path]) -> None:
    windowed = DraftModel.load("gemma", open_model(str(tiny_folder("gemma3_text"))), "float32", 100, 512)
    prompt = [(7 * i * i + 3 * i) % 90 for i in range(400)]
    seq = Sequence(1, list(prompt), GREEDY, 0)
    guesses(windowed, seq, 8)
    for cut in (398, 380, 40):  # the last is farther back than the windows reach
        shorter = Sequence(1, prompt[:cut], GREEDY, 0)
        fresh = Sequence(2, prompt[:cut], GREEDY, 0)
        assert guesses(windowed, shorter, 4) == guesses(windowed, fresh, 4)
        windowed.forget(2)
