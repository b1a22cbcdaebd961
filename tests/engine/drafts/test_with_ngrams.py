"""A draft model and n-grams together: each drafts where it should, and the model keeps up."""

import pytest
from engine.drafts.test_draft_model import drafts_of

from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import Drafter, has_heads, model_in
from splitinfer.engine.drafts.with_ngrams import ModelWithNGrams
from splitinfer.errors import LayoutError
from splitinfer.models.hub import open_model

PASSAGE = [(13 * i * i + 5 * i) % 2048 for i in range(60)]
QUOTING = [*PASSAGE, 7, *PASSAGE[:40]]
PROSE = [(31 * i * i + 7) % 2048 for i in range(20)]


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "ahead"])
def model(request: pytest.FixtureRequest) -> DraftModel:
    made = DraftModel.load("draft", open_model("demo-draft"), "float32", 2048, 512)
    made.use_device(MlxDevice(computes_at_launch=not request.param))
    return made


def sequence(seq_id: int, tokens: list[int], temperature: float = 0.0) -> Sequence:
    return Sequence(seq_id, list(tokens), SamplingParams(temperature=temperature), seq_id)


def ids(drafter: Drafter, seq: Sequence, count: int) -> list[int]:
    return [draft.token_id for draft in drafts_of(drafter, seq, count)]


def alone(model: DraftModel, seq: Sequence, behind: list[int], count: int) -> list[int]:
    fresh = Sequence(seq.seq_id + 1000, [*seq.stream, *behind], seq.params, seq.seed)
    try:
        return ids(model, fresh, count)
    finally:
        model.forget(fresh.seq_id)


def test_each_drafts_where_it_has_been_right(model: DraftModel) -> None:
    both = ModelWithNGrams(model)
    assert both.name == "draft+ngram"
    prose, quoting = sequence(1, PROSE, 0.8), sequence(2, QUOTING)
    assert ids(both, prose, 4) == alone(model, prose, [], 4)
    assert ids(both, quoting, 5) == PASSAGE[40:45]
    assert not both.prepare(quoting)
    assert model._entries[2].tokens == [], "the model has computed nothing"
    both.forget(1)
    both.forget(2)


def test_the_models_drafts_follow_the_guesses(model: DraftModel) -> None:
    """The passage ends within the block, and the model takes over, alone and beside others."""
    both = ModelWithNGrams(model)
    ids(both, sequence(9, PROSE), 1)
    ending = sequence(3, [*PASSAGE, *PASSAGE[:57]], 0.8)
    guessed = PASSAGE[57:60]  # and then the passage begins anew, as it did
    found = ids(both, ending, 8)
    assert found[:3] == guessed
    others = [sequence(4, PROSE, 0.8), sequence(5, QUOTING), sequence(6, PROSE[:9])]
    expected = [alone(model, others[0], [], 4), PASSAGE[40:44], alone(model, others[2], [], 2)]
    rounds = list(both.draft_together(others, [4, 4, 2]))
    for i, one in enumerate(expected):
        assert [drafts[i].token_id for drafts in rounds if drafts[i] is not None] == one
    for seq_id in range(3, 10):
        both.forget(seq_id)


def test_given_drafts_and_the_models_behind_them(model: DraftModel) -> None:
    """Any number given of each, some more than wanted: what the model says behind them is what it says to them."""
    seqs = [sequence(11, PROSE, 0.8), sequence(12, PASSAGE), sequence(13, PROSE[:7], 0.8)]
    for given, counts in (
        ([[5, 6], [], [7]], [5, 3, 3]),
        ([[1, 2, 3], [4], []], [2, 4, 0]),
        ([[], [8], [9, 9]], [1, 6, 6]),
    ):
        rounds = list(model.draft_together(seqs, counts, given))
        for i, (seq, known, count) in enumerate(zip(seqs, given, counts, strict=True)):
            got = [drafts[i].token_id for drafts in rounds if drafts[i] is not None]
            assert got == [*known, *alone(model, seq, known, max(0, count - len(known)))][:count], (i, given)
        for seq, known in zip(seqs, given, strict=True):
            seq.tokens += [*known[:1], 99]
    for seq in seqs:
        model.forget(seq.seq_id)


def test_guesses_cost_nothing_and_the_models_drafts_do(model: DraftModel) -> None:
    both = ModelWithNGrams(model)
    first = next(drafts_of(both, sequence(21, QUOTING), 1))
    assert first.seconds != 0.0, "the first draft of all is the model's, so that its cost is known"
    assert [draft.seconds for draft in drafts_of(both, sequence(22, QUOTING), 3)] == [0.0] * 3
    both.forget(21)
    both.forget(22)


def test_names() -> None:
    assert [model_in(name) for name in ("a/b", "a/b+ngram", "ngram", "a+b", "mtp+ngram")] == [
        "a/b", "a/b", None, "a+b", None,
    ]  # fmt: skip
    assert [has_heads(name) for name in ("mtp", "mtp+ngram", "ngram", None)] == [True, True, False, False]
    for nonsense in ("+ngram", "ngram+ngram", "none+ngram"):
        with pytest.raises(LayoutError, match="names no model before"):
            model_in(nonsense)
