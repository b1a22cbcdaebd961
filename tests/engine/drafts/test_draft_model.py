"""A model as drafter: that it says what it would say alone, whatever was rolled back in between."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
from stages import plain_greedy, plain_sampled

from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.core.speculation.speculation import Draft
from splitinfer.demo import TARGET
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.device.strict import strict_device
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.errors import ModelError
from splitinfer.machine.machine import Hop, Machine
from splitinfer.models.hub import open_model
from splitinfer.models.step import StepModel, Way

DRAFT = TARGET.parent / "draft"
PROMPT = [5, 90, 7, 300, 41, 8, 1000, 77, 3, 250, 60, 12]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "ahead"])
def model(request: pytest.FixtureRequest) -> DraftModel:
    made = DraftModel.load("draft", open_model("demo-draft"), "float32", 2048, 512)
    made.use_device(strict_accelerator() if request.param else MlxDevice(computes_at_launch=True))
    return made


def strict_accelerator() -> EmulatedDevice:
    """On which a round is launched ahead."""
    costs = StageCosts.through({1: 1e-5})
    return EmulatedDevice(Machine((costs,), (Hop(),), (1,), draft=1e-5), strict=strict_device())


def drafts_of(drafter: Drafter, seq: Sequence, count: int) -> Iterator[Draft]:
    return (draft for (draft,) in drafter.draft_together([seq], [count]) if draft is not None)


def guesses(model: DraftModel, seq: Sequence, count: int) -> list[int]:
    return [draft.token_id for draft in drafts_of(model, seq, count)]


def test_it_says_what_it_says_alone(model: DraftModel) -> None:
    expected = plain_greedy(DRAFT, PROMPT, 20)
    seq = Sequence(1, list(PROMPT), GREEDY, 0)
    said = guesses(model, seq, 5)
    seq.drafts.ahead = list(said)
    said += guesses(model, seq, 7)
    seq.tokens += said[:6]
    seq.drafts.ahead, seq.drafts.waiting = said[6:9], said[9:]
    said += guesses(model, seq, 8)
    assert said == expected
    model.forget(1)


def test_it_draws_with_the_targets_noise(model: DraftModel) -> None:
    expected = plain_sampled(DRAFT, PROMPT, 20, temperature=0.8, seed=9, vocab_size=2048)
    seq = Sequence(2, list(PROMPT), SAMPLED, 9)
    assert guesses(model, seq, 20) == expected
    model.forget(2)


def test_what_depends_on_the_drafts_before_is_drawn_when_these_are_read(model: DraftModel) -> None:
    params = SamplingParams(repetition_penalty=1.5)
    seq, longer = (Sequence(seq_id, list(PROMPT), params, 0) for seq_id in (7, 8))
    for _ in range(12):
        longer.tokens += guesses(model, longer, 1)
    assert guesses(model, seq, 12) == longer.tokens[len(PROMPT) :] != plain_greedy(DRAFT, PROMPT, 12)
    model.forget(7)
    model.forget(8)


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
    drafts = drafts_of(model, seq, 6)
    first = [next(drafts).token_id for _ in range(2)]
    drafts.close()
    seq.tokens += first
    assert [*first, *guesses(model, seq, 4)] == plain_greedy(DRAFT, PROMPT, 6)


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
    assert len(model._entries) <= 16
    for seq_id in range(200, 230):
        model.forget(seq_id)


# -- several sequences in one step -----------------------------------------------------------------

MANY = {
    10: SamplingParams(),
    11: SamplingParams(temperature=0.8),
    12: SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02),
    13: SamplingParams(),
    14: SamplingParams(temperature=0.8, top_k=40),
}


def many(lengths: Seq[int]) -> list[Sequence]:
    """Sequences of these lengths, each with its own parameters and seed."""
    made = zip(lengths, MANY.items(), strict=True)
    return [
        Sequence(seq_id, [(31 * i * i + 7 * seq_id) % 2048 for i in range(n)], params, seq_id)
        for n, (seq_id, params) in made
    ]


def untimed(draft: Draft | None) -> Draft | None:
    return None if draft is None else replace(draft, seconds=None)


def in_turns(model: DraftModel, seqs: Seq[Sequence], counts: Seq[int]) -> list[list[Draft]]:
    """The drafts of each sequence, from rounds."""
    found: list[list[Draft]] = [[] for _ in seqs]
    for drafts in model.draft_together(seqs, counts):
        assert len(drafts) == len(seqs)
        for own, draft in zip(found, map(untimed, drafts), strict=True):
            own += [] if draft is None else [draft]
    return found


def alone(model: DraftModel, seq: Sequence, count: int) -> list[Draft]:
    """What a sequence gets from a model that has never seen it."""
    fresh = Sequence(1000 + seq.seq_id, list(seq.stream), seq.params, seq.seed)
    try:
        return [replace(draft, seconds=None) for draft in drafts_of(model, fresh, count)]
    finally:
        model.forget(fresh.seq_id)


@pytest.mark.parametrize("lengths", [(12, 12, 12, 12, 12), (12, 9, 12, 30, 5)], ids=["even", "ragged"])
def test_together_each_gets_what_it_gets_alone(model: DraftModel, lengths: tuple[int, ...]) -> None:
    """The arithmetic here does not depend on the number of rows."""
    seqs, counts = many(lengths), [6, 3, 5, 0, 6]
    expected = [alone(model, seq, count) for seq, count in zip(seqs, counts, strict=True)]
    assert [len(one) for one in expected] == counts
    assert in_turns(model, seqs, counts) == expected
    for seq in seqs:
        model.forget(seq.seq_id)


def test_together_through_rollbacks_joins_and_leaves(model: DraftModel) -> None:
    """Sequences go on by different numbers of right drafts, sit out rounds, end, and others begin."""
    seqs = many((12, 9, 12, 30, 5))
    for turn, among in enumerate(([0, 1, 2], [0, 1, 2, 3], [3, 0, 4], [4, 1], [0, 1, 2, 3, 4], [2])):
        asked = [seqs[i] for i in among]
        counts = [1 + (turn + i) % 5 for i in among]
        found = in_turns(model, asked, counts)
        for i, seq, count, drafts in zip(among, asked, counts, found, strict=True):
            assert drafts == alone(model, seq, count), (turn, i)
            right = (turn * 3 + i) % (count + 1)
            seq.tokens += [draft.token_id for draft in drafts[:right]]
            seq.tokens.append((turn * 71 + i) % 2048)
        if turn == 3:
            model.forget(seqs[4].seq_id)
    for seq in seqs:
        model.forget(seq.seq_id)


def test_together_in_one_call_of_attention() -> None:
    """Where lengths may differ within a call, what was rolled back in it is not read again."""
    model = DraftModel.load("draft", open_model("demo-draft"), "float32", 2048, 512)
    model._step = StepModel(model._model, exact=False)
    seqs, cohorts = many((12, 9, 12, 30, 5)), set()
    for turn in range(4):
        counts = [4] * 5
        for seq, drafts in zip(seqs, in_turns(model, seqs, counts), strict=True):
            expected = alone(model, seq, 4)
            assert [d.token_id for d in drafts] == [d.token_id for d in expected], turn
            right = (turn + seq.seq_id) % 4
            seq.tokens += [*(draft.token_id for draft in drafts[:right]), (turn * 71 + right) % 2048]
        cohorts |= {model._entries[seq.seq_id].caches.cohort for seq in seqs}
    assert len(cohorts) == 1, "a rollback must not copy everybody's KV"
    assert None not in cohorts
    for seq in seqs:
        assert [d.token_id for d in drafts_of(model, seq, 3)] == [d.token_id for d in alone(model, seq, 3)]


def test_rounds_that_are_left_early_do_no_harm(model: DraftModel) -> None:
    seqs = many((12, 9, 12, 30, 5))
    for stop_after in (1, 2, 3):
        expected = [alone(model, seq, 5) for seq in seqs]
        counts, found = [5] * len(seqs), []
        rounds = model.draft_together(seqs, counts)
        for _ in range(stop_after):
            found.append(list(map(untimed, next(rounds))))
            counts[1] = 1  # the second sequence has enough after one
        rounds.close()
        for i, own in enumerate(expected):
            got = [drafts[i] for drafts in found]
            assert got == (own[:stop_after] if i != 1 else [own[0]] + [None] * (stop_after - 1))
        for i, seq in enumerate(seqs):
            seq.tokens += [draft.token_id for draft in expected[i][:stop_after]]
    assert in_turns(model, seqs, [3] * 5) == [alone(model, seq, 3) for seq in seqs]
    for seq in seqs:
        model.forget(seq.seq_id)


def test_a_round_is_one_step_of_the_model(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seqs, rows = many((12, 12, 12, 12, 12)), []
    run = model._step.run
    monkeypatch.setattr(
        model._step, "run", lambda parts, ids, hidden: rows.append([p.count for p in parts]) or run(parts, ids, hidden)
    )
    for _ in range(2):  # what was computed for drafts is not computed again behind them
        for seq, drafts in zip(seqs, in_turns(model, seqs, [4, 4, 4, 2, 4]), strict=True):
            seq.drafts.ahead += [draft.token_id for draft in drafts]
    assert rows[-4:] == [[1] * 5, [1] * 5, [1] * 4, [1] * 4]
    assert model._step.way is Way.ROWS
    for seq in seqs:
        model.forget(seq.seq_id)


def test_an_id_of_padding_ends_a_sequence_and_no_other(model: DraftModel) -> None:
    """A model's vocabulary may be padded; such an id must never be sent."""
    seqs = many((12, 9, 12, 30, 5))
    expected = [alone(model, seq, 6) for seq in seqs]
    model._vocab_size, before = 1 + max(d.token_id for d in expected[0][:3]), model._vocab_size
    try:
        found = in_turns(model, seqs, [6] * 5)
    finally:
        model._vocab_size = before
    limit = 1 + max(d.token_id for d in expected[0][:3])
    for own, got in zip(expected, found, strict=True):
        assert got == own[: next((i for i, d in enumerate(own) if d.token_id >= limit), 6)]
    assert in_turns(model, seqs, [6] * 5) == expected
    for seq in seqs:
        model.forget(seq.seq_id)


def test_a_draft_that_cannot_go_back_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="cannot be rolled back"):
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
