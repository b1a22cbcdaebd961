"""A model as drafter: it says what it would say alone, whatever was rolled back in between, among others and with
n-grams beside it."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from stages import plain_greedy, plain_sampled
from tiny import Folder

from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.speculation import Draft
from splitinfer.demo import TARGET
from splitinfer.engine.device.device import Device
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import Drafter, ModelWithNGrams, has_heads, model_in
from splitinfer.errors import LayoutError, ModelError
from splitinfer.machine.costs import Costs
from splitinfer.models.folder.hub import open_model
from tests.emulation.device import EmulatedDevice
from tests.emulation.machine import Hop, Machine
from tests.emulation.strict import strict_device

DRAFT = TARGET.parent / "draft"
PROMPT = [5, 90, 7, 300, 41, 8, 1000, 77, 3, 250, 60, 12]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "ahead"])
def model(request: pytest.FixtureRequest) -> DraftModel:
    made = DraftModel.load("draft", open_model("demo-draft"), "float32", 2048, 512, lambda _: None)
    accelerator = Machine((Costs.through({1: 1e-5}),), (Hop(),), (1,), draft=1e-5)
    ahead = EmulatedDevice(accelerator, strict=strict_device())  # on which a round is launched ahead
    made.use_device(ahead if request.param else Device(computes_at_launch=True))
    return made


def drafts_of(drafter: Drafter, seq: Sequence, count: int) -> Iterator[Draft]:
    return (draft for (draft,) in drafter.draft_together([seq], [count]) if draft is not None)


def guesses(drafter: Drafter, seq: Sequence, count: int) -> list[int]:
    return [draft.token_id for draft in drafts_of(drafter, seq, count)]


def alone(model: DraftModel, seq: Sequence, count: int, behind: Seq[int] = ()) -> list[int]:
    """What a sequence gets from a model that has never seen it. ``behind``: guesses of others."""
    fresh = Sequence(1000 + seq.seq_id, [*seq.streamed(0), *behind], seq.params, seq.seed)
    try:
        return guesses(model, fresh, count)
    finally:
        model.forget(fresh.seq_id)


def test_it_says_what_it_says_alone(model: DraftModel) -> None:
    """Drawn with the target's noise where it is sampled; with penalties, behind its own drafts."""
    seq = Sequence(1, list(PROMPT), GREEDY, 0)
    said = guesses(model, seq, 5)
    seq.drafts.ahead = list(said)
    said += guesses(model, seq, 7)
    seq.tokens += said[:6]
    seq.drafts.ahead, seq.drafts.waiting = said[6:9], said[9:]
    said += guesses(model, seq, 8)
    greedy = plain_greedy(DRAFT, PROMPT, 20)
    assert said == greedy
    sampled = plain_sampled(DRAFT, PROMPT, 20, temperature=0.8, seed=9, vocab_size=2048)
    assert guesses(model, Sequence(2, list(PROMPT), SAMPLED, 9), 20) == sampled
    penalised, longer = (Sequence(i, list(PROMPT), SamplingParams(repetition_penalty=1.5), 0) for i in (3, 4))
    for _ in range(12):
        longer.tokens += guesses(model, longer, 1)
    assert guesses(model, penalised, 12) == longer.tokens[len(PROMPT) :] != greedy[:12]
    for seq_id in range(1, 5):
        model.forget(seq_id)


def test_a_long_prompt_is_read_in_parts(model: DraftModel) -> None:
    long = [(7 * i * i + 3 * i) % 2048 for i in range(300)]
    seq, parts = Sequence(6, long, GREEDY, 0), 0
    while model.prepare(seq):
        parts += 1
    assert parts == 3
    assert guesses(model, seq, 6) == plain_greedy(DRAFT, long, 6)


MANY = (GREEDY, SAMPLED, SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02), GREEDY, replace(SAMPLED, top_k=40))


def many() -> list[Sequence]:
    """Sequences of several lengths, each with its own parameters and seed."""
    made = enumerate(zip((12, 9, 12, 30, 5), MANY, strict=True), 10)
    return [Sequence(i, [(31 * j * j + 7 * i) % 2048 for j in range(n)], params, i) for i, (n, params) in made]


def in_turns(
    model: DraftModel, seqs: Seq[Sequence], counts: Seq[int], given: Seq[list[int]] | None = None
) -> list[list[int]]:
    """The drafts of each sequence, from rounds."""
    rounds = list(model.draft_together(seqs, counts, *([given] if given is not None else [])))
    return [[drafts[i].token_id for drafts in rounds if drafts[i] is not None] for i in range(len(seqs))]


def test_together_through_rollbacks_joins_and_leaves(model: DraftModel) -> None:
    """Sequences go on by different numbers of right drafts, sit out rounds, end, and others begin."""
    seqs = many()
    for turn, among in enumerate(([0, 1, 2], [0, 1, 2, 3], [3, 0, 4], [4, 1], [0, 1, 2, 3, 4], [2])):
        asked, counts = [seqs[i] for i in among], [(turn + i) % 6 for i in among]
        expected = [alone(model, seq, count) for seq, count in zip(asked, counts, strict=True)]
        assert in_turns(model, asked, counts) == expected, turn
        for i, seq, drafts in zip(among, asked, expected, strict=True):
            seq.tokens += [*drafts[: (turn * 3 + i) % (len(drafts) + 1)], (turn * 71 + i) % 2048]
        if turn == 3:
            model.forget(seqs[4].seq_id)
    for seq in seqs:
        model.forget(seq.seq_id)


def test_rounds_that_are_left_early_do_no_harm(model: DraftModel) -> None:
    seqs = many()
    for stop_after in (1, 3):
        expected, counts = [alone(model, seq, 5) for seq in seqs], [5] * len(seqs)
        rounds = model.draft_together(seqs, counts)
        for number in range(stop_after):
            found = [None if draft is None else draft.token_id for draft in next(rounds)]
            assert found == [own[number] if number == 0 or i != 1 else None for i, own in enumerate(expected)]
            counts[1] = 1  # the second sequence has enough after one
        rounds.close()
        for seq, own in zip(seqs, expected, strict=True):
            seq.tokens += own[:stop_after]
    for seq in seqs:
        model.forget(seq.seq_id)


def test_a_draft_that_cannot_go_back_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(ModelError, match="cannot be rolled back"):
        DraftModel.load("next", open_model(str(tiny_folder("qwen3_next"))), "float32", 100, 128, lambda _: None)


def test_sliding_windows_go_back_far_enough(tiny_folder: Folder) -> None:
    gemma = open_model(str(tiny_folder("gemma3_text")))
    windowed = DraftModel.load("gemma", gemma, "float32", 100, 512, lambda _: None)
    prompt = [(7 * i * i + 3 * i) % 90 for i in range(400)]
    guesses(windowed, Sequence(1, list(prompt), GREEDY, 0), 8)
    for cut in (398, 380, 40):  # the last is farther back than the windows reach
        shorter = Sequence(1, prompt[:cut], GREEDY, 0)
        assert guesses(windowed, shorter, 4) == alone(windowed, shorter, 4)


PASSAGE = [(13 * i * i + 5 * i) % 2048 for i in range(60)]
QUOTING = [*PASSAGE, 7, *PASSAGE[:40]]


def test_each_drafts_where_it_has_been_right(model: DraftModel) -> None:
    """A passage ends within a block, and the model takes over, alone and beside others."""
    both = ModelWithNGrams(model)
    assert both.name == "draft+ngram"
    prose, quoting = Sequence(1, list(PROMPT), SAMPLED, 1), Sequence(2, list(QUOTING), GREEDY, 2)
    assert guesses(both, prose, 4) == alone(model, prose, 4)
    found = list(drafts_of(both, quoting, 5))
    assert [draft.token_id for draft in found] == PASSAGE[40:45]
    assert [draft.seconds for draft in found] == [0.0] * 5, "guesses cost nothing"
    ending = Sequence(3, [*PASSAGE, *PASSAGE[:57]], SAMPLED, 3)
    assert guesses(both, ending, 8)[:3] == PASSAGE[57:60]
    expected = [alone(model, prose, 4), PASSAGE[40:44]]
    rounds = list(both.draft_together([prose, quoting], [4, 4]))
    assert [[drafts[i].token_id for drafts in rounds] for i in range(2)] == expected
    for seq_id in (1, 2, 3):
        both.forget(seq_id)


def test_given_drafts_and_the_models_behind_them(model: DraftModel) -> None:
    """Any number given of each, some more than wanted: what the model says behind them is what it says to them."""
    seqs = [Sequence(11, list(PROMPT), SAMPLED, 11), Sequence(12, list(PASSAGE), GREEDY, 0)]
    for given, counts in (([[5, 6], []], [5, 3]), ([[1, 2, 3], [4]], [2, 4]), ([[], [9, 9]], [1, 6])):
        found = in_turns(model, seqs, counts, given)
        for seq, known, count, got in zip(seqs, given, counts, found, strict=True):
            assert got == [*known, *alone(model, seq, max(0, count - len(known)), known)][:count], given
            seq.tokens += [*known[:1], 99]
    for seq in seqs:
        model.forget(seq.seq_id)


def test_names() -> None:
    names = ("a/b", "a/b+ngram", "ngram", "a+b", "mtp+ngram")
    assert [model_in(name) for name in names] == ["a/b", "a/b", None, "a+b", None]
    assert [has_heads(name) for name in ("mtp", "mtp+ngram", "ngram", None)] == [True, True, False, False]
    for nonsense in ("+ngram", "ngram+ngram", "none+ngram"):
        with pytest.raises(LayoutError, match="names no model before"):
            model_in(nonsense)
